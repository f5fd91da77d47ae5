"""The training of one rank under a strategy: sums of gradients, the plain step part by part, the loop over the steps.

Gradients are of the summed loss of every micro-batch; the global number of tokens divides them once, after all sums.
Between the last backward and the optimizer, once a step (Megatron-Core `finalize_model_grads`, modes.md 4.7):

    1. over each data axis: all gradients, one flat all-reduce SUM for each dtype
    2. over the weight axis: the partial gradients of whole parameters, one flat all-reduce SUM for each dtype, or for
       each parameter; then over each loss axis: loss sum and token count, one all-reduce SUM of float64 [2]
    3. no call: all gradients are divided by the token count
    4. over the weight axis and each norm axis: the squared norm, one all-reduce SUM of a scalar

The strategy's `Step` (`parallel.model.strategy`) is `PLAIN`, with some parts replaced by schemes. The outcome is what
this rank holds, without padding. Logits are [rows, seq, width]; sequence b of micro-batch m is row (data_rank * micro +
m) * batch + b, a packed row is row data_rank * micro + m. Activations are those of micro-batch 0, numbered in the same
way with micro = 1.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shardproof.parallel.checkpoints.saving import load, read_again, save
from shardproof.parallel.communication.batch import deliver
from shardproof.parallel.communication.collectives import all_reduce
from shardproof.parallel.communication.layout import Axis, Box, Mesh, Placement, rows
from shardproof.parallel.communication.schedules import TABLE, stages_at
from shardproof.parallel.layers.block import wide
from shardproof.parallel.layers.loss import Metric, token_weights
from shardproof.parallel.layers.randomness import SHARES, Dropout, continues_streams, initial_value, streams_of
from shardproof.parallel.model.loss_scale import LossScaling
from shardproof.parallel.model.strategy import Rank, Scheduled, Step, Strategy, Value
from shardproof.parallel.model.transformer import Transformer
from shardproof.reference.case import Case
from shardproof.reference.language.core import MODES
from shardproof.reference.model.parameters import dtype_of
from shardproof.reference.training.steps import states_after


def sum_gradients(gradients: Iterable[Tensor], axis: Axis) -> None:
    """Replace gradients by their sums over the axis, in place: one flat all-reduce for every dtype among them."""
    if axis.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for group in by_dtype.values():
        summed = all_reduce(torch.cat([gradient.flatten() for gradient in group]), axis)
        for gradient, part in zip(group, summed.split([gradient.numel() for gradient in group]), strict=True):
            gradient.copy_(part.view_as(gradient))


def sum_scalars(loss: Tensor, tokens: Tensor, axes: Iterable[Axis]) -> tuple[Tensor, Tensor]:
    """The sums of loss and token count over these axes, as float64 scalars."""
    pair = torch.stack([loss.double(), tokens.double()])
    for axis in axes:
        pair = all_reduce(pair, axis)
    return pair[0], pair[1]


def norm(
    gradients: Mapping[str, Tensor], places: Mapping[str, Placement], axes: Sequence[Axis], dtype: torch.dtype
) -> Tensor:
    """The L2 norm of the full gradients, a scalar of `dtype`: every element counts once.

    A gradient counts on every rank of an axis that splits it, and only on the first rank of every other axis.
    """

    def counts(name: str) -> bool:
        return all(axis.name in places[name].axes or axis.rank == 0 for axis in axes)

    squares = [gradient.to(dtype).square().sum() for name, gradient in gradients.items() if counts(name)]
    if not squares:  # a rank may hold nothing but copies of other ranks' gradients
        squares = [next(iter(gradients.values())).new_zeros((), dtype=dtype)]
    total = torch.stack(squares).sum()
    for axis in axes:
        total = all_reduce(total, axis)
    return total.sqrt()


def clip(gradients: Iterable[Tensor], total: Tensor, largest: float) -> None:
    """Scale all gradients in place by min(1, largest / (total + 1e-6)); 0 for `largest` turns clipping off."""
    if largest > 0:
        factor = (largest / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)


LARGEST_LOGITS = 2**24
"""An outcome leaves out the logits of a step with more elements than this."""
_WEIGHT_DECAY = 0.01


class MicroBatches:
    """The micro-batches of a rank in a step: the forward of each, and the sums over them on the last stage.

    Without a pipeline the one stage is the whole model, both first and last.
    """

    def __init__(self, rank: Rank, step: int) -> None:
        self.rank, self.step = rank, step
        self.loss = torch.zeros((), dtype=torch.float64, device=rank.device)
        self.tokens = torch.zeros_like(self.loss)
        self._boxes: list[Box] | None = [] if self._keeps_logits() else None

    @property
    def sums(self) -> Scheduled:
        """Loss sum, number of tokens and logits of the micro-batches so far."""
        return self.loss, self.tokens, None if self._boxes is None else tuple(self._boxes)

    def _keeps_logits(self) -> bool:
        rank, case = self.rank, self.rank.case
        small = case.dp * case.micro * case.tokens * case.vocab <= LARGEST_LOGITS
        return rank.has_numbers and rank.chunks[-1][0].last and small

    def forward(self, micro: int, chunk: int = 0, received: Tensor | None = None) -> Tensor:
        """Run a stage's layers on a micro-batch; return hidden states, or on the last stage the scaled summed loss."""
        rank, strategy = self.rank, self.rank.strategy
        stage, model = rank.chunks[chunk]
        batch = rank.parts.local(deliver(rank.case, rank.mesh, self.step, micro, rank.device, stage=stage))
        output: Tensor = model(batch, received)
        if not stage.last:
            return output
        labels = strategy.laid_out(batch.labels)
        losses = rank.parts.loss(output, labels)
        weights = token_weights(labels, strategy.laid_out(batch.loss_mask)).to(losses.dtype)
        summed = (losses * weights).sum()
        self.loss += summed.detach()
        self.tokens += weights.sum()
        if rank.metric is not None:
            with torch.no_grad():
                rank.metric(output, labels, weights)
        if self._boxes is not None:
            self._boxes += self._logits(micro, output.detach())
        return summed if rank.step.loss_scale is None else rank.step.loss_scale.scale_loss(summed)

    def _logits(self, micro: int, logits: Tensor) -> tuple[Box, ...]:
        rank, case = self.rank, self.rank.case
        place = rank.strategy.activation(case, "head")
        assert place is not None  # every mode says how logits lie
        first = (rank.mesh.axis("dp").rank * case.micro + micro) * case.rows
        boxes = rank.boxes(rank.strategy.laid_out(logits), place)
        return rows(boxes, first=first, total=case.dp * case.micro * case.rows)


def run_micro_batches(rank: Rank, step: int) -> Scheduled:
    """All micro-batches of a step, each forward and backward: this rank's loss sum, number of tokens and logits."""
    micro_batches = MicroBatches(rank, step)
    for micro in range(rank.case.micro):
        micro_batches.forward(micro).backward()
    return micro_batches.sums


def sum_over_data(rank: Rank) -> None:
    """Sum all gradients over the data axes, in one flat call for each axis and dtype."""
    mesh, gradients = rank.mesh, rank.step.partial(rank)
    for axis in rank.strategy.data_axes:
        sum_gradients(gradients.values(), mesh.axis(axis))


def sum_over_weights(rank: Rank) -> None:
    """Sum the gradients that are partial on the weight axis over it: one flat call a dtype, or one a gradient."""
    strategy, gradients = rank.strategy, rank.step.partial(rank)
    weight_axis = rank.mesh.axis(strategy.weight_axis)
    partial = [gradient for name, gradient in gradients.items() if strategy.partial(rank.case, name)]
    for group in [partial] if strategy.coalesced else [[gradient] for gradient in partial]:
        sum_gradients(group, weight_axis)


def total_norm(rank: Rank) -> Tensor:
    """The norm of the full gradients: squares are summed over the weight axis and `Strategy.norm_axes`."""
    axes = [rank.mesh.axis(axis) for axis in (rank.strategy.weight_axis, *rank.strategy.norm_axes)]
    gradients = rank.gradients()
    if rank.chunks[-1][0].copies_table:
        del gradients[TABLE]  # it counts on the first stage only
    return norm(gradients, rank.updated_places, axes, wide(dtype_of(rank.case)))


def make_optimizer(case: Case, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """The case's optimizer over these tensors."""
    if case.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=case.lr, weight_decay=_WEIGHT_DECAY)
    return torch.optim.SGD(parameters, lr=case.lr)


def _same_rank(rank: Rank) -> Rank:
    return rank


def _do_nothing(_rank: Rank) -> None:
    return None


PLAIN = Step(
    prepare=_same_rank,
    schedule=run_micro_batches,
    reductions={"data": sum_over_data, "partial": sum_over_weights},
    partial=Rank.gradients,
    norm=total_norm,
    optimizer=lambda rank: make_optimizer(rank.case, list(rank.updated.values())),
    afterwards=_do_nothing,
    beside=lambda _rank, _step: {},
)
"""The plain step: one micro-batch after the other, flat calls over each data axis, the case's optimizer over the
parameters.
"""


def train(case: Case, strategy: Strategy, mesh: Mesh, device: torch.device) -> dict[str, Value]:
    """Run the case on this rank and return its outcome; every rank of the mesh must call this with the same case."""
    rank = set_up(case, strategy, mesh, device)
    optimizer = rank.step.optimizer(rank)
    before = 0
    if case.load and rank.has_numbers:
        before = load(rank, optimizer, Path(case.load))
    outcome: dict[str, Value] = {}
    if rank.has_numbers and case.init != "whole":
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
            if step == 0 and rank.has_numbers:
                kept = torch.clone if case.clip or case.steps > 1 else torch.detach  # nothing changes them any more
                outcome |= {f"grad/{name}": rank.value(kept(grad), places[name]) for name, grad in gradients.items()}
            clip(gradients.values(), norm, case.clip)
        optimizer.step()
        rank.step.afterwards(rank)
        if rank.has_numbers:
            outcome |= {**_state_after(rank, step, optimizer), **rank.step.beside(rank, step)}
        del gradients  # otherwise they would be alive beside those of the next step
    if rank.metric is not None:
        outcome |= _metrics(rank, rank.metric)
    outcome |= rank.dropout.masks()
    if case.save and rank.has_numbers:
        save(rank, optimizer, Path(case.save), steps=before + case.steps)
        outcome |= read_again(case) if mesh.rank == 0 else {}
    return outcome | {f"param/{name}": rank.value(p.detach(), rank.places[name]) for name, p in rank.parameters.items()}


def set_up(case: Case, strategy: Strategy, mesh: Mesh, device: torch.device) -> Rank:
    """Build the model and fill every parameter with its part of the full weight; a meta device holds no values."""
    places = strategy.placements(case)
    parts = strategy.parts(case, mesh, device)
    own = stages_at(case, mesh.coordinates)
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
                parameter.fill_(math.nan)  # until `load`, which does not read as the dense model does
            else:
                parameter.copy_(initial_value(case, name, places[name], mesh.coordinates, streams))
    if case.init == "shard" and continues_streams(mesh.coordinates) and MODES[case.mode].system == "Megatron-Core":
        # The streams of initial values continue as those of dropout; other context ranks have seeds of their own.
        dropout.streams.load_state_dict(streams.state_dict())
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
        parts.terms.scale_loss = rank.step.loss_scale.scale_loss
    return rank.step.prepare(rank)


def _place(case: Case, strategy: Strategy, module: str) -> Placement:
    """The placement, for a data rank's rows, of a module's output or of attention's shares."""
    place = strategy.shares(case) if module == SHARES else strategy.activation(case, module)
    assert place is not None  # every mode says how hidden states lie
    return place


def _metric(case: Case, strategy: Strategy, mesh: Mesh) -> Metric | None:
    place = strategy.activation(case, "head")
    if not case.metric or place is None:
        return None
    return Metric(place, mesh.axis("tp"), vocab=case.vocab, sequence_dim=strategy.sequence_dim)


def _state_after(rank: Rank, step: int, optimizer: torch.optim.Optimizer) -> dict[str, Value]:
    """The parameters and the optimizer's states after this step, with their places."""
    return {
        state: rank.value(tensor, (rank.places if state.startswith("param_") else rank.updated_places)[name])
        for state, name, tensor in states_after(rank.case, step, rank.parameters, optimizer, updated=rank.updated)
    }


def _metrics(rank: Rank, metric: Metric) -> dict[str, tuple[Box, ...]]:
    """The metric's sums over the run, one row a data rank. Those that rounding may change are given in float64 only."""
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
    """Divide all gradients by the scale, in place, and update it. Returns whether any rank's are infinite or NaN.

    Unlike in Megatron, a skipped step still computes its norm and gathers the unchanged parameters, so that its calls
    follow from the case alone. Source: Megatron-Core 0.16.1 `MixedPrecisionOptimizer` (around.md 15.2).
    """
    gradients = rank.gradients().values()
    mine = torch.stack([(~torch.isfinite(gradient)).any() for gradient in gradients]).any()
    found = mine.to(torch.float32)
    for axis in (rank.strategy.weight_axis, *rank.strategy.norm_axes):
        found = all_reduce(found, rank.mesh.axis(axis), op="max")
    for axis in itertools.chain(*rank.strategy.expert_data_axes.values()):
        found = all_reduce(found, rank.mesh.axis(axis), op="max")
    for gradient in gradients:
        gradient.div_(scale.value)
    infinite = rank.has_numbers and bool(found.item())
    scale.update(infinite=infinite)
    return infinite


def _synchronise(rank: Rank, loss: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Turn local gradient sums into gradients of the mean loss; returns that loss, their norm and the token count.

    The norm is None if the loss scale skips the step.
    """
    strategy, mesh = rank.strategy, rank.mesh
    for reduce in rank.step.reductions.values():
        reduce(rank)
    loss, tokens = sum_scalars(loss, tokens, [mesh.axis(axis) for axis in strategy.loss_axes])
    skipped = rank.step.loss_scale is not None and _unscale(rank, rank.step.loss_scale)
    for gradient in rank.gradients().values():
        gradient.div_(tokens)
    exact, norm = wide(dtype_of(rank.case)), rank.step.norm(rank)
    return (loss / tokens).to(exact), None if skipped else norm, tokens.long()
