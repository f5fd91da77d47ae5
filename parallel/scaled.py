"""Half-precision training with dynamic loss scaling, for the experiment gpt3-857m-tp4: `parallel.scaled:subject`.

Beside the plain subject's calls, once a step inside of the optimizer's (Megatron-Core `MixedPrecisionOptimizer.step`,
modes.md 5):

    found_inf | all_reduce MAX float32 [] over tp

A step with an infinite gradient on any rank is skipped; after HYSTERESIS of them the scale is halved, each time. Unlike
Megatron the norm is computed in skipped steps too, so that the calls follow from the case alone. The scale is a power
of two. Which steps are skipped is no mathematics of the dense model, so the outcome holds the first step's loss and
logits only: numbers are proved by the plain subject, calls by this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from parallel.collectives import all_reduce
from parallel.expectation import Term, per_step
from parallel.mesh import Axis, Mesh
from parallel.registry import MODES
from parallel.strategy import Rank, Step, Value
from parallel.subject import subject as plain
from parallel.training import train
from reference.case import Case

__all__ = ["FIRST_SCALE", "HYSTERESIS", "Scale", "ScaledSubject", "subject"]

FIRST_SCALE = 2.0**32
HYSTERESIS = 2


@dataclass(slots=True, kw_only=True)
class Scale:
    """The loss scale and how many more infinite steps it takes before it is halved."""

    value: float = FIRST_SCALE
    patience: int = HYSTERESIS
    skipped: int = 0

    def update(self, *, infinite: bool) -> None:
        """After a step: halve when patience is over; it does not come back within a run as short as these."""
        if not infinite:
            return
        self.skipped += 1
        self.patience -= 1
        if self.patience <= 0:
            self.value /= 2

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss [], whose gradients are `value` times as large."""
        scaled: Tensor = _Scaled.apply(loss, self.value)
        return scaled

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide all gradients by `value`, in place."""
        for gradient in gradients:
            gradient.div_(self.value)


class _Scaled(torch.autograd.Function):
    """Forward identity, backward times the scale."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


class _Optimizer(torch.optim.SGD):
    """Steps unless a gradient is infinite on some rank of the axis, and updates the scale."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, scale: Scale, axis: Axis) -> None:
        super().__init__(parameters, lr=lr)
        self._scale, self._axis = scale, axis

    def step(self, closure: Any = None) -> Any:
        """One step, or none."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        mine = torch.stack([(~torch.isfinite(gradient)).any() for gradient in gradients]).any()
        infinite = bool(all_reduce(mine.to(torch.float32), self._axis, op="max").item())
        result = None if infinite else super().step(closure)
        self._scale.update(infinite=infinite)
        return result


def _scaled(_case: Case, step: Step) -> Step:
    """The plain step on scaled gradients, with an optimizer that skips."""
    scale = Scale()

    def optimizer(rank: Rank) -> torch.optim.Optimizer:
        return _Optimizer(rank.updated.values(), rank.case.lr, scale, rank.mesh.axis(rank.strategy.weight_axis))

    return replace(step, loss_scale=scale, optimizer=optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledSubject:
    """Tensor parallelism as in the seed's experiment; one data rank."""

    modes: tuple[str, ...] = field(default=("tp", "tp-sp"))
    unchecked: tuple[str, ...] = ("loss/[!0]*", "logits/[!0]*")
    """It returns the first step's alone: whether a later one updates anything depends on the scale."""

    def __call__(self, case: Case, device: torch.device) -> dict[str, Value]:
        """Run the case on this rank. Raises ValueError with the reason for a case that it refuses."""
        reason = self.refuses(case)
        if reason:
            raise ValueError(reason)
        outcome = train(case, replace(MODES[case.mode], step=_scaled), Mesh.of(case), device)
        return {name: value for name, value in outcome.items() if name in ("loss/0", "logits/0")}

    def refuses(self, case: Case) -> str:
        """Why this case is not supported, "" when it is."""
        if case.dp > 1 or case.metric:
            return "dynamic loss scaling is offered without data ranks and metric; legal: dp=1 metric=false"
        return plain.refuses(case)

    def expected(self, case: Case) -> Iterator[Term]:
        """The plain subject's calls and the one about infinite gradients."""
        yield from plain.expected(case)
        for term in per_step(case, "all_reduce", 4, axis="tp", dtype="float32"):
            yield replace(term, phase="step", reduce_op="max")


subject = ScaledSubject()
"""Dynamic loss scaling, entering by the same door as everybody's."""
