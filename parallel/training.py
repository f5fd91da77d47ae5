"""The steps of one rank: micro-batches forward and backward, synchronisation, optimizer, outcome.

Gradients are of the summed loss of every micro-batch; the global token count divides them once, after all sums. The
outcome is what this rank holds: shards of what is split, full tensors of what is whole, padding never.
Logits and activations are [rows, seq, width]; row (data_rank * micro + m) * batch + b, packed data_rank * micro + m.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from parallel import gradients as sync
from parallel.batch import deliver
from parallel.layout import Box, Placement, pieces, rows, shard
from parallel.loss import counted
from parallel.mesh import Axis, Mesh
from parallel.metric import Metric
from parallel.norm import wide
from parallel.strategy import Mode, Parts
from parallel.transformer import Transformer
from reference.case import Case
from reference.model.parameters import dtype_of, full
from reference.training.states import after

__all__ = ["LARGEST_LOGITS", "Rank", "Scaling", "Value", "set_up", "train"]

Value = Tensor | tuple[Box, ...]
LARGEST_LOGITS = 2**24
"""Elements of the full logits of one step above which an outcome leaves them out."""
_WEIGHT_DECAY = 0.01


class Scaling(Protocol):
    """The loss scaling of one rank: the factor of this step's gradients, and the optimizer that follows it."""

    value: float

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss [], whose gradients are `value` times as large."""
        ...

    def optimizer(self, parameters: list[Tensor], lr: float, axis: Axis) -> torch.optim.Optimizer:
        """The optimizer of these parameters, which are split over the axis."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank at work: the model under its mode, its parameters by name and their places, its metric if any."""

    case: Case
    mode: Mode
    mesh: Mesh
    device: torch.device
    parts: Parts
    model: Transformer
    parameters: Mapping[str, Tensor]
    places: Mapping[str, Placement]
    metric: Metric | None
    scaling: Scaling | None = None

    @property
    def proves(self) -> bool:
        """Are there numbers to compare? A run on shapes alone shall need the memory of training and no more."""
        return self.device.type != "meta"

    def boxes(self, local: Tensor, place: Placement) -> tuple[Box, ...]:
        """The boxes of the full tensor that a local tensor of this rank holds."""
        axis = self.mesh.axis(place.axis or self.mode.weight_axis)
        return pieces(local, place, index=axis.rank, parts=axis.size)

    def value(self, name: str, local: Tensor) -> Value:
        """A parameter-shaped tensor as a value of the outcome."""
        place = self.places[name]
        return self.boxes(local, place) if place.axis else local

    def gradients(self) -> dict[str, Tensor]:
        """Every parameter's gradient by name."""
        return {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}


def train(
    case: Case, mode: Mode, mesh: Mesh, device: torch.device, *, scaling: Scaling | None = None
) -> dict[str, Value]:
    """Run the case on this rank and return its outcome; every rank of the mesh must call this with the same case."""
    rank = set_up(case, mode, mesh, device)
    optimizer = _optimizer(case, list(rank.parameters.values()))
    if scaling is not None:
        rank = replace(rank, scaling=scaling)
        optimizer = scaling.optimizer(list(rank.parameters.values()), case.lr, mesh.axis(mode.weight_axis))
    outcome: dict[str, Value] = {}
    for step in range(case.steps):
        optimizer.zero_grad()
        loss, tokens, logits = _accumulate(rank, step)
        outcome[f"loss/{step}"], norm, counted_tokens = _synchronise(rank, loss, tokens)
        outcome[f"tokens/{step}"] = counted_tokens.long()
        outcome[f"grad_norm/{step}"] = norm
        gradients = rank.gradients()
        if logits is not None:
            outcome[f"logits/{step}"] = logits
        if step == 0 and rank.proves:
            outcome |= {f"grad/{name}": rank.value(name, grad.clone()) for name, grad in gradients.items()}
        sync.clip(gradients.values(), norm, case.clip)
        optimizer.step()
        if rank.proves:
            left = after(case, step, rank.parameters, optimizer)
            outcome |= {state: rank.value(name, tensor) for state, name, tensor in left}
        del gradients  # or they would stand beside those of the next step
    if rank.metric is not None:
        outcome |= _metrics(rank, rank.metric)
    return outcome | {f"param/{name}": rank.value(name, p.detach()) for name, p in rank.parameters.items()}


def set_up(case: Case, mode: Mode, mesh: Mesh, device: torch.device) -> Rank:
    """Build the model and fill every parameter with its part of the full weight; a meta device holds no values."""
    places = mode.placements(case)
    parts = mode.parts(case, mesh, device)
    model = Transformer(case, mode, parts, device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items() if device.type != "meta" else ():
            axis = mesh.axis(places[name].axis or mode.weight_axis)
            parameter.copy_(shard(full(case, name), places[name], index=axis.rank, parts=axis.size))
    return Rank(
        case=case,
        mode=mode,
        mesh=mesh,
        device=device,
        parts=parts,
        model=model,
        parameters=parameters,
        places=places,
        metric=_metric(case, mode, mesh),
    )


def _metric(case: Case, mode: Mode, mesh: Mesh) -> Metric | None:
    place = mode.activation(case, "head")
    if not case.metric or place is None:
        return None
    return Metric(place, mesh.axis("tp"), vocab=case.vocab, sequence_dim=mode.sequence_dim)


def _metrics(rank: Rank, metric: Metric) -> dict[str, tuple[Box, ...]]:
    """The metric's sums over the run, one row a data rank; those that rounding may turn in float64 only."""
    dp = rank.mesh.axis("dp")
    names = ["tokens", "log_likelihood", "loss_of", *(("right", "right_of") if rank.case.dtype == "float64" else ())]
    sums: dict[str, Tensor] = {name: getattr(metric.total, name) for name in names}
    return {
        f"metric/{name}": (
            Box(
                local=value[None],
                offsets=(dp.rank, *[0] * value.dim()),
                global_shape=(dp.size, *value.shape),
            ),
        )
        for name, value in sums.items()
    }


def _accumulate(rank: Rank, step: int) -> tuple[Tensor, Tensor, tuple[Box, ...] | None]:
    """All micro-batches of a step, forward and backward: this rank's loss sum, token count and logits."""
    case, mode = rank.case, rank.mode
    sequences = 1 if case.packed else case.batch
    total = case.dp * case.micro * sequences
    keep = rank.proves and case.dp * case.micro * case.tokens * case.vocab <= LARGEST_LOGITS
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
        if rank.scaling is not None:
            summed = rank.scaling.scaled(summed)
        if rank.metric is not None:
            with torch.no_grad():
                rank.metric(logits, labels, weights)
        summed.backward()
        loss += summed.detach()
        tokens += weights.sum()
        place = mode.activation(case, "head")
        if keep and place is not None:
            first = (rank.mesh.axis("dp").rank * case.micro + micro) * sequences
            boxes += rows(rank.boxes(mode.laid_out(logits.detach()), place), first=first, total=total)
    return loss, tokens, tuple(boxes) if keep else None


def _synchronise(rank: Rank, loss: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn local gradient sums into gradients of the mean loss; returns that loss, their norm and the token count."""
    mode, mesh, gradients = rank.mode, rank.mesh, rank.gradients()
    for axis in mode.data_axes:
        sync.sum_gradients(gradients.values(), mesh.axis(axis))
    weight_axis = mesh.axis(mode.weight_axis)
    partial = [gradient for name, gradient in gradients.items() if mode.partial(rank.case, name)]
    for group in [partial] if mode.coalesced else [[gradient] for gradient in partial]:
        sync.sum_gradients(group, weight_axis, op=mode.partial_op)
    loss, tokens = sync.sum_scalars(loss, tokens, [mesh.axis(axis) for axis in mode.loss_axes])
    if rank.scaling is not None:
        for gradient in gradients.values():
            gradient.div_(rank.scaling.value)
    shares = math.prod(mesh.axis(axis).size for axis in mode.mean_axes)
    for gradient in gradients.values():
        gradient.div_(tokens * shares)
    exact = wide(dtype_of(rank.case))
    return (loss / tokens).to(exact), sync.norm(gradients, rank.places, weight_axis, exact), tokens


def _optimizer(case: Case, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """The case's optimizer over this rank's parameters."""
    if case.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=case.lr, weight_decay=_WEIGHT_DECAY)
    return torch.optim.SGD(parameters, lr=case.lr)
