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

from parallel import gradients as sync
from parallel.batch import deliver
from parallel.collectives import all_reduce
from parallel.expectation import Term, per_step
from parallel.layout import Box, rows
from parallel.loss import counted
from parallel.mesh import Axis, Mesh
from parallel.norm import wide
from parallel.registry import MODES
from parallel.subject import subject as plain
from parallel.training import Rank, Value, set_up
from reference.case import Case
from reference.parameters import dtype_of

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


class _Optimizer(torch.optim.SGD):
    """Steps unless a gradient is infinite on some rank of the axis, and tells the scale."""

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
        return _train(case, Mesh.of(case), device)

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


def _train(case: Case, mesh: Mesh, device: torch.device) -> dict[str, Value]:
    rank, scale = set_up(case, MODES[case.mode], mesh, device), Scale()
    axis = mesh.axis(rank.mode.weight_axis)
    optimizer = _Optimizer(list(rank.parameters.values()), case.lr, scale, axis)
    outcome: dict[str, Value] = {}
    for step in range(case.steps):
        optimizer.zero_grad()
        loss, tokens, logits = _accumulate(rank, step, scale.value)
        if step == 0:
            outcome = {"loss/0": (loss / tokens).to(wide(dtype_of(case))), **logits}
        gradients = rank.gradients()
        partial = [gradient for name, gradient in gradients.items() if rank.mode.partial(case, name)]
        for group in [partial] if rank.mode.coalesced else [[gradient] for gradient in partial]:
            sync.sum_gradients(group, axis, op=rank.mode.partial_op)
        for gradient in gradients.values():
            gradient.div_(scale.value).div_(tokens)
        total = sync.norm(gradients, rank.places, axis, wide(dtype_of(case)))
        sync.clip(gradients.values(), total, case.clip)
        optimizer.step()
    return outcome


def _accumulate(rank: Rank, step: int, scale: float) -> tuple[Tensor, Tensor, dict[str, Value]]:
    """All micro-batches of a step with the loss scaled before backward: loss sum, token count, logits by name."""
    case, mode = rank.case, rank.mode
    loss = torch.zeros((), dtype=torch.float64, device=rank.device)
    tokens = torch.zeros_like(loss)
    boxes: list[Box] = []
    for micro in range(case.micro):
        batch = rank.parts.local(deliver(case, rank.mesh, step, micro, rank.device))
        logits = rank.model(batch)
        labels = mode.laid_out(batch.labels)
        losses = rank.parts.loss(logits, labels)
        weights = counted(labels, mode.laid_out(batch.loss_mask)).to(losses.dtype)
        summed = (losses * weights).sum()
        (summed * scale).backward()
        loss += summed.detach()
        tokens += weights.sum()
        place = mode.activation(case, "head")
        if step == 0 and place is not None:
            first = micro * case.batch
            boxes += rows(rank.boxes(mode.laid_out(logits.detach()), place), first=first, total=case.micro * case.batch)
    return loss, tokens, {f"logits/{step}": tuple(boxes)} if boxes else {}


subject = ScaledSubject()
"""Dynamic loss scaling, entering by the same door as everybody's."""
