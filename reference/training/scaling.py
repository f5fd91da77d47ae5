"""The loss scale of float16 training in the dense model: which steps it skips, and what it becomes.

A step whose scaled gradients leave float16 is skipped by every implementation alike, as long as they leave it clearly.
In between, where the rounding or order of sums decides, no dense model can say: such a case is refused. Source: the
rule in words of around.md 15.2; arXiv:1710.03740.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.checkpoints.foreign import stored_tensors
from shardproof.reference.errors import CaseError
from shardproof.reference.training.reach import Reach

GROWTH_INTERVAL = 1000
HYSTERESIS = 2
_LARGEST = torch.finfo(torch.float16).max
_UNIT = 2.0**-11
"""The largest relative error of rounding to float16."""


class Reaching(Protocol):
    """The sums of a step, and the range of their gradients."""

    @property
    def reach(self) -> Reach:
        """The largest numbers that float16 tensors of the step may hold."""
        ...


_Sums = TypeVar("_Sums", bound=Reaching)


@dataclass(slots=True, kw_only=True)
class LossScale:
    """The scale of the coming step; finite steps since it grew or one was infinite, infinite ones since it grew."""

    case: Case
    value: float
    finite: int = 0
    infinite: int = 0

    @classmethod
    def of(cls, case: Case) -> "LossScale":
        """The scale before the first step; 1 without a scaler."""
        state = stored_tensors(case).get("train.loss_scale") if case.scaler != "none" and case.load else None
        if state is not None:  # weights of another system come without one
            value, finite, hysteresis = state.tolist()
            return cls(case=case, value=value, finite=int(finite), infinite=HYSTERESIS - int(hysteresis))
        return cls(case=case, value=1.0 if case.scaler == "none" else case.loss_scale)

    def run_step(self, step: int, backward: Callable[[float], _Sums], *, exact: bool) -> tuple[_Sums, float, bool]:
        """A step: its sums, their scale, and whether it is skipped.

        `exact`: the sums are computed in a wider dtype than float16. Otherwise they may overflow here although a step
        in another order of sums is not skipped. Such a step is computed with a smaller scale: a power of two changes no
        digit.
        """
        sums = backward(self.value)
        if exact:
            return sums, self.value, self._overflows(step, sums.reach)
        if self.case.scaler == "none" or sums.reach.finite:
            return sums, self.value, False
        least = backward(1.0)
        if not least.reach.finite or least.reach.least * self.value > _LARGEST:
            return least, 1.0, True
        scale = self.value / 2
        while not (sums := backward(scale)).reach.finite:
            scale /= 2
        return sums, scale, False

    def _overflows(self, step: int, reach: Reach) -> bool:
        """Whether the step is skipped, by the range of its scaled gradients in a wider dtype than float16.

        Raises CaseError if they are neither surely outside of float16 nor surely inside.
        """
        if self.case.scaler == "none" or not reach.finite:  # not finite: the case diverges
            return False
        rounding = _roundings(self.case) * _UNIT
        if reach.least > (1 + rounding) * _LARGEST:
            return True
        if reach.bound < (1 - rounding) * _LARGEST:
            return False
        rule = (
            f"some scaled gradient in step {step} reaches {reach.least:.3g} to {reach.bound:.3g}, at the edge of "
            f"float16 ({_LARGEST:.5g}): rounding decides the skip"
        )
        legal = 2.0 ** math.floor(math.log2(self.value * (1 - rounding) * _LARGEST / reach.bound))
        raise CaseError("loss_scale", self.case.loss_scale, rule, f"loss_scale={max(1.0, legal)}")

    def outcome(self, step: int, *, skipped: bool) -> dict[str, Tensor]:
        """Values of the step's scale in an outcome; empty without a scaler."""
        if self.case.scaler == "none":
            return {}
        return {f"loss_scale/{step}": torch.tensor(self.value), f"skipped/{step}": torch.tensor(int(skipped))}

    def saved_state(self) -> dict[str, Tensor]:
        """State of the scale in a checkpoint of the case: "saved/loss_scale", float64 [3] as `train.loss_scale`."""
        if self.case.scaler == "none" or not self.case.save:
            return {}
        state = [self.value, self.finite, HYSTERESIS - self.infinite]
        return {"saved/loss_scale": torch.tensor(state, dtype=torch.float64)}

    def update(self, *, skipped: bool) -> None:
        """Change the scale as the step does."""
        if self.case.scaler != "dynamic":
            return
        if skipped:
            self.finite, self.infinite = 0, self.infinite + 1
            if self.infinite >= HYSTERESIS:
                self.value = max(1.0, self.value / 2)
        else:
            self.finite += 1
            if self.finite == GROWTH_INTERVAL:
                self.finite = self.infinite = 0
                self.value *= 2


def _roundings(case: Case) -> int:
    """The largest number of roundings in a row from the tokens to a gradient; each changes it by a share of _UNIT at
    most.

    A block has 13 operations, forward and backward: norm, linear, heads' norm, rotation, scores, context, linear, sum;
    norm, linear, activation, linear, sum. Outside of blocks there are no more than in one. Up to four sums over ranks
    belong to a block. The last ones are those of micro-batches and data ranks.
    """
    blocks = len(case.blocks) + 1
    return blocks * (2 * 13 + 4 * (case.world_size // case.dp - 1)) + case.micro * case.dp
