"""The steps of one rank: schedule, reductions, mean, norm, clip, optimizer, what follows it; and the outcome.

The strategy's `Step` defines each of them. The outcome is what this rank holds: shards of what is split, full tensors
of what is whole, padding never. Activations are [rows, seq, width]; row data_rank * batch + b, packed data_rank.
"""

import itertools
import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shardproof.parallel.communication import gradients as sync
from shardproof.parallel.communication.collectives import all_reduce
from shardproof.parallel.communication.layout import Box, Placement
from shardproof.parallel.communication.mesh import Mesh
from shardproof.parallel.layers.block import wide
from shardproof.parallel.layers.loss import Metric
from shardproof.parallel.model.loss_scale import LossScaling
from shardproof.parallel.model.strategy import Rank, Strategy, Value
from shardproof.parallel.model.transformer import Transformer
from shardproof.parallel.randomness.dropout import SHARES, Dropout
from shardproof.parallel.randomness.initial import initial, streams_of
from shardproof.parallel.randomness.streams import goes_on
from shardproof.parallel.schedules.stages import held_at
from shardproof.parallel.training.step import PLAIN
from shardproof.reference.case import Case
from shardproof.reference.language.modes import MODES
from shardproof.reference.model.parameters import dtype_of
from shardproof.reference.training.states import after


def train(case: Case, strategy: Strategy, mesh: Mesh, device: torch.device) -> dict[str, Value]:
    """Run the case on this rank and return its outcome; every rank of the mesh must call this with the same case."""
    rank = set_up(case, strategy, mesh, device)
    optimizer = rank.step.optimizer(rank)
    before = 0
    if case.load and rank.proves:
        from shardproof.parallel.checkpoints.loading import load  # noqa: PLC0415

        before = load(rank, optimizer, Path(case.load))
    outcome: dict[str, Value] = {}
    if rank.proves and case.init != "whole":
        held = {name: (p.detach().clone(), rank.places[name]) for name, p in rank.parameters.items()}
        outcome |= {f"init/{name}": rank.value(*one) for name, one in held.items()}
    for step in range(case.steps):
        optimizer.zero_grad()
        loss, tokens, logits = rank.step.schedule(rank, step)
        scale = rank.step.loss_scale and rank.step.loss_scale.value
        outcome[f"loss/{step}"], norm, outcome[f"tokens/{step}"] = _synchronise(rank, loss, tokens)
        gradients, places = rank.gradients(), rank.updated_places
        if logits is not None:
            outcome[f"logits/{step}"] = logits
        if scale is not None:
            skipped = torch.tensor(0 if norm is not None else 1)
            outcome |= {f"loss_scale/{step}": torch.tensor(scale), f"skipped/{step}": skipped}
        if norm is None:
            optimizer.zero_grad()  # it leaves alone what has no gradient
        else:
            outcome[f"grad_norm/{step}"] = norm
            if step == 0 and rank.proves:
                kept = torch.clone if case.clip or case.steps > 1 else torch.detach  # nothing changes them any more
                outcome |= {f"grad/{name}": rank.value(kept(grad), places[name]) for name, grad in gradients.items()}
            sync.clip(gradients.values(), norm, case.clip)
        optimizer.step()
        rank.step.afterwards(rank)
        if rank.proves:
            outcome |= {**_left(rank, step, optimizer), **rank.step.beside(rank, step)}
        del gradients  # or they would stand beside those of the next step
    if rank.metric is not None:
        outcome |= _metrics(rank, rank.metric)
    outcome |= rank.dropout.masks()
    if case.save and rank.proves:
        from shardproof.parallel.checkpoints.saving import read_again, save  # noqa: PLC0415

        save(rank, optimizer, Path(case.save), steps=before + case.steps)
        outcome |= read_again(case) if mesh.rank == 0 else {}
    return outcome | {f"param/{name}": rank.value(p.detach(), rank.places[name]) for name, p in rank.parameters.items()}


def set_up(case: Case, strategy: Strategy, mesh: Mesh, device: torch.device) -> Rank:
    """Build the model and fill every parameter with its part of the full weight; a meta device holds no values."""
    places = strategy.placements(case)
    parts = strategy.parts(case, mesh, device)
    own = held_at(case, mesh.coordinates)
    dropout = Dropout.of(
        case, mesh.coordinates, partial(_place, case, strategy), sequence_dim=strategy.sequence_dim, device=device
    )
    chunks = tuple((stage, Transformer(case, strategy, parts, dropout, device, stage)) for stage in own)
    parameters = {name: parameter for _, chunk in chunks for name, parameter in chunk.named_parameters()}
    places = {name: place for name, place in places.items() if any(stage.holds(name) for stage in own)}
    streams = streams_of(case, mesh.coordinates)
    with torch.no_grad():
        for name, parameter in parameters.items() if device.type != "meta" else ():
            if case.load:
                parameter.fill_(math.nan)  # until the checkpoint is read, by another reader than the dense model's
            else:
                parameter.copy_(initial(case, name, places[name], mesh.coordinates, streams))
    if case.init == "shard" and goes_on(mesh.coordinates) and MODES[case.mode].system == "Megatron-Core":
        dropout.streams.load_state_dict(streams.state_dict())  # they go on; other context ranks have seeds of their own
    rank = Rank(
        case=case,
        strategy=strategy,
        step=strategy.step(case, PLAIN),
        mesh=mesh,
        device=device,
        parts=parts,
        chunks=chunks,
        parameters=parameters,
        places=places,
        updated=parameters,
        updated_places=places,
        metric=_metric(case, strategy, mesh) if own[-1].last else None,
        dropout=dropout,
    )
    if rank.step.loss_scale is not None:
        parts.terms.scaled = rank.step.loss_scale.scaled
    return rank.step.prepare(rank)


def _place(case: Case, strategy: Strategy, module: str) -> Placement:
    """How what dropout reads lies for the rows of a data rank: a module's output, or the shares of attention."""
    place = strategy.shares(case) if module == SHARES else strategy.activation(case, module)
    assert place is not None  # every mode states where hidden states lie
    return place


def _metric(case: Case, strategy: Strategy, mesh: Mesh) -> Metric | None:
    place = strategy.activation(case, "head")
    if not case.metric or place is None:
        return None
    return Metric(place, mesh.axis("tp"), vocab=case.vocab, sequence_dim=strategy.sequence_dim)


def _left(rank: Rank, step: int, optimizer: torch.optim.Optimizer) -> dict[str, Value]:
    """State after this step: parameters as they lie, and the optimizer's states as the tensors lie that it steps."""
    return {
        state: rank.value(tensor, (rank.places if state.startswith("param_") else rank.updated_places)[name])
        for state, name, tensor in after(rank.case, step, rank.parameters, optimizer, updated=rank.updated)
    }


def _metrics(rank: Rank, metric: Metric) -> dict[str, tuple[Box, ...]]:
    """The metric's sums over the run, one row a data rank; those that rounding may turn in float64 only."""
    dp = rank.mesh.axis("dp")
    names = ["tokens", "log_likelihood", "loss_of", *(("right", "right_of") if rank.case.dtype == "float64" else ())]
    sums: dict[str, Tensor] = {name: getattr(metric.total, name) for name in names}
    return {
        f"metric/{name}": (
            Box(local=value[None], offsets=(dp.rank, *[0] * value.dim()), global_shape=(dp.size, *value.shape)),
        )
        for name, value in sums.items()
    }


def _unscale(rank: Rank, scale: LossScaling) -> bool:
    """Divide all gradients by the scale, in place, and update it; whether one of any rank is not finite.

    Unlike Megatron's, a skipped step computes its norm too and gathers parameters that nothing changed, so that the
    calls follow from the case alone. Source: Megatron-Core 0.16.1 `MixedPrecisionOptimizer` (around.md 15.2).
    """
    gradients = rank.gradients().values()
    mine = torch.stack([(~torch.isfinite(gradient)).any() for gradient in gradients]).any()
    found = mine.to(torch.float32)
    for axis in (rank.strategy.weight_axis, *rank.strategy.norm_axes):
        found = all_reduce(found, rank.mesh.axis(axis), op="max")
    for axis in itertools.chain(*rank.strategy.apart.values()):
        found = all_reduce(found, rank.mesh.axis(axis), op="max")
    for gradient in gradients:
        gradient.div_(scale.value)
    infinite = rank.proves and bool(found.item())
    scale.update(infinite=infinite)
    return infinite


def _synchronise(rank: Rank, loss: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Turn local gradient sums into gradients of the mean loss; returns that loss, their norm and the token count.

    The norm is None where the loss scale has the step skipped.
    """
    strategy, mesh = rank.strategy, rank.mesh
    for reduce in rank.step.reductions.values():
        reduce(rank)
    loss, tokens = sync.sum_scalars(loss, tokens, [mesh.axis(axis) for axis in strategy.loss_axes])
    skipped = rank.step.loss_scale is not None and _unscale(rank, rank.step.loss_scale)
    for gradient in rank.gradients().values():
        gradient.div_(tokens)
    exact, norm = wide(dtype_of(rank.case)), rank.step.norm(rank)
    return (loss / tokens).to(exact), None if skipped else norm, tokens.long()
