"""Variants of modes: what a real system's known deviation replaces, and nothing else. The product holds no switches.

    variant                | replaced piece      | by
    norm-average           | Strategy.partial_op | avg
    isp-average            | Strategy.mean_axes      | tp
    scrambled-embedding    | Parts.embedding     | a gradient scattered on flat memory
    gathered-logits-loss   | Parts.loss          | the vocabulary-parallel loss, fed whole logits
    flat-dim1              | regions of linears  | collectives on flat memory
    label-smoothing-local  | Parts.loss          | smoothing over one rank's columns
    decoder-layer-thirds   | Strategy.placements     | of wqkv: three equal blocks, a piece of each
    dropped-heads          | Strategy.placements     | of attention: kv_heads // tp kv heads on each rank
    context-heads-repeated | Parts.core          | keys and values repeated for their groups first
    two-stage-swap         | Step.schedule       | one group for both directions
    ckpt-early-stop        | Step.prepare        | chunks whose recomputation ends where torch's does
    ddp-rebuild            | Step, its buckets   | one bucket in the first step
    pp-scale-missing       | Step.schedule       | the last stage's loss, micro times as large
    tied-no-sync           | Step.reductions     | none over the embedding group
    tied-bucket-misaligned | Step, its buckets   | the token table among other parameters

The closed form stays that of the right mathematics. Which cases show a variant, and where it comes from:
`reference.case.variants`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from parallel.communication.layout import Box, Placement
from parallel.communication.mesh import Mesh
from parallel.data_parallel.buffers import Buckets
from parallel.data_parallel.deviations import RebuiltBuckets, TableAmongOthers
from parallel.data_parallel.scheme import held_by
from parallel.deviations import FlatRegion, ScrambledEmbedding, smoothed_by_parts
from parallel.layers.embedding import Head
from parallel.layers.linear import ColumnLinear, RowLinear
from parallel.layers.loss import vocabulary_cross_entropy
from parallel.model.strategy import Parts, Rank, Step, Strategy
from parallel.model.transformer import Transformer
from parallel.pipeline.execution import BACK, StageRun, as_scheduled
from parallel.registry import strategy_of
from parallel.schedules.pipeline import Action
from parallel.schemes import autotp
from parallel.slicing.deviations import DEVIATIONS
from parallel.slicing.heads import Heads, fused_rows, kv_rows, query_rows
from parallel.slicing.held import Held
from parallel.weights.tables import WeightEmbedding
from reference.case import Case
from reference.case.data_parallel import WORDS as DATA_PARALLEL_WORDS

__all__ = ["DEVIATING", "deviating"]

_Change = Callable[[Case, Mesh, Parts], Parts]


def deviating(mode: Strategy, case: Case) -> Strategy:
    """The mode as the case's variant changes it; the mode itself without one."""
    return DEVIATING[case.variant](mode) if case.variant else mode


def _changed(change: _Change) -> Callable[[Strategy], Strategy]:
    """The mode whose parts are changed once they are made."""

    def apply(mode: Strategy) -> Strategy:
        def parts(case: Case, mesh: Mesh, device: torch.device) -> Parts:
            return change(case, mesh, mode.parts(case, mesh, device))

        return dataclasses.replace(mode, parts=parts)

    return apply


def _scrambled_embedding(_case: Case, _mesh: Mesh, parts: Parts) -> Parts:
    def embedding() -> nn.Module:
        right = parts.embedding()
        assert isinstance(right, WeightEmbedding)  # the variant is offered with this form only
        return ScrambledEmbedding(right)

    return dataclasses.replace(parts, embedding=embedding)


def _gathered_logits_loss(case: Case, mesh: Mesh, parts: Parts) -> Parts:
    axis = mesh.axis("tp")

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        # Each rank takes the whole logits for its part: tp times as many classes.
        classes = case.vocab * axis.size
        fused = case.cross_entropy == "fused"
        return vocabulary_cross_entropy(
            logits, labels, axis, vocab=classes, smoothing=case.label_smoothing, fused=fused
        )

    return dataclasses.replace(parts, loss=loss)


def _flat_regions(_case: Case, _mesh: Mesh, parts: Parts) -> Parts:
    def flat(module: nn.Module) -> nn.Module:
        assert isinstance(module, ColumnLinear | RowLinear | Head)  # in the modes that have this variant
        region = module.region
        module.region = FlatRegion(**{f.name: getattr(region, f.name) for f in dataclasses.fields(region)})
        return module

    # The embedding gathers columns and cuts its own tokens, which is right.
    return dataclasses.replace(parts, linear=lambda name: flat(parts.linear(name)), head=lambda: flat(parts.head()))


def _label_smoothing_local(case: Case, mesh: Mesh, parts: Parts) -> Parts:
    axis = mesh.axis("tp")

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return smoothed_by_parts(logits, labels, axis, vocab=case.vocab, smoothing=case.label_smoothing)

    return dataclasses.replace(parts, loss=loss)


def _context_heads_repeated(_case: Case, _mesh: Mesh, parts: Parts) -> Parts:
    def core(q: Tensor, k: Tensor, v: Tensor, hidden_B1SS: Tensor | None, keep: Tensor | None) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        return parts.core(q, k, v, hidden_B1SS, keep)

    return dataclasses.replace(parts, core=core)


def _placed(change: Callable[[Case], Mapping[str, Held]], *, fewer: bool = False) -> Callable[[Strategy], Strategy]:
    """The mode autotp whose ranks hold other rows and columns of some modules of attention.

    `fewer`: their outputs have fewer features as well, and not the right number of wrong ones.
    """

    def placements(case: Case) -> dict[str, Placement]:
        held, places = change(case), autotp.placements(case)
        return {name: _moved(place, held.get(name.split(".")[-2], ())) for name, place in places.items()}

    def activation(case: Case, module: str) -> Placement | None:
        place = autotp.activation(case, module)
        return place and _moved(place, change(case).get(module.rpartition(".")[2], ()))

    def apply(mode: Strategy) -> Strategy:
        parts = partial(autotp.parts, sequence_dim=mode.sequence_dim, placed=placements)
        seen = activation if fewer else mode.activation
        return dataclasses.replace(mode, placements=placements, parts=parts, activation=seen)

    return apply


def _moved(place: Placement, held: Held) -> Placement:
    if not held or not place.cuts:
        return place
    return dataclasses.replace(place, cuts=(dataclasses.replace(place.cuts[0], held=held),))


def _decoder_layer_thirds(case: Case) -> dict[str, Held]:
    return {"wqkv": DEVIATIONS["decoder-layer-thirds"].held(autotp.attention_heads(case), case.tp)}


def _dropped_heads(case: Case) -> dict[str, Held]:
    """Whole heads of a model with as many of them as are shared evenly: the last ones are on no rank."""
    heads = autotp.attention_heads(case)
    kv = heads.kv // case.tp * case.tp
    fewer = Heads(query=kv * heads.group, kv=kv, size=heads.size)
    query, key = query_rows(fewer, case.tp), kv_rows(fewer, case.tp)
    held = {"wqkv": fused_rows(fewer, case.tp, "groups")}
    return held | dict.fromkeys(("wq", "wo", "q_norm"), query) | dict.fromkeys(("wk", "wv", "k_norm"), key)


def _two_stage_swap(mode: Strategy) -> Strategy:
    def in_one_group(rank: Rank, step: int) -> tuple[Tensor, Tensor, tuple[Box, ...] | None]:
        axes = {name: axis for name, axis in rank.mesh.axes.items() if name != BACK}
        return as_scheduled(dataclasses.replace(rank, mesh=dataclasses.replace(rank.mesh, axes=axes)), step)

    def step(case: Case, plain: Step) -> Step:
        return dataclasses.replace(mode.step(case, plain), schedule=in_one_group)

    return dataclasses.replace(mode, step=step)


def _early_stop(mode: Strategy) -> Strategy:
    def step(case: Case, plain: Step) -> Step:
        before = mode.step(case, plain)

        def prepare(rank: Rank) -> Rank:
            for _, chunk in rank.chunks:
                assert isinstance(chunk, Transformer)
                chunk.case = case.but(variant="", early_stop=True)
            return before.prepare(rank)

        return dataclasses.replace(before, prepare=prepare)

    return dataclasses.replace(mode, step=step)


class _Undivided(StageRun):
    """Stages whose gradients are micro times as large."""

    def forward(self, action: Action) -> None:
        """A stage's layers of a micro-batch; the last stage's loss is a mean of one micro-batch, not of all."""
        super().forward(action)
        if self.rank.chunks[action.chunk][0].last:
            self.outputs[action.micro, action.stage] *= self.rank.case.micro


def _undivided_stages(mode: Strategy) -> Strategy:
    def step(case: Case, plain: Step) -> Step:
        return dataclasses.replace(mode.step(case, plain), schedule=partial(as_scheduled, by=_Undivided))

    return dataclasses.replace(mode, step=step)


def _unsummed_table(mode: Strategy) -> Strategy:
    def step(case: Case, plain: Step) -> Step:
        before = mode.step(case, plain)
        rest = {name: reduce for name, reduce in before.reductions.items() if name != "embedding"}
        return dataclasses.replace(before, reductions=rest)

    return dataclasses.replace(mode, step=step)


def _in_buckets(buckets: Callable[[Case], Buckets]) -> Callable[[Strategy], Strategy]:
    """The mode whose gradients lie in these buckets; its closed form stays."""

    def apply(mode: Strategy) -> Strategy:
        def step(case: Case, plain: Step) -> Step:
            others = strategy_of(case.but(variant="", loss_scale=1.0, **DATA_PARALLEL_WORDS))
            return held_by(buckets(case), case, others.step(case, plain))

        return dataclasses.replace(mode, step=step)

    return apply


DEVIATING: dict[str, Callable[[Strategy], Strategy]] = {
    "norm-average": lambda mode: dataclasses.replace(mode, partial_op="avg"),
    "isp-average": lambda mode: dataclasses.replace(mode, mean_axes=("tp",)),
    "scrambled-embedding": _changed(_scrambled_embedding),
    "gathered-logits-loss": _changed(_gathered_logits_loss),
    "flat-dim1": _changed(_flat_regions),
    "label-smoothing-local": _changed(_label_smoothing_local),
    "decoder-layer-thirds": _placed(_decoder_layer_thirds),
    "context-heads-repeated": _changed(_context_heads_repeated),
    "dropped-heads": _placed(_dropped_heads, fewer=True),
    "two-stage-swap": _two_stage_swap,
    "ckpt-early-stop": _early_stop,
    "ddp-rebuild": _in_buckets(RebuiltBuckets),
    "pp-scale-missing": _undivided_stages,
    "tied-no-sync": _unsummed_table,
    "tied-bucket-misaligned": _in_buckets(TableAmongOthers),
}
"""Variant -> the mode that deviates."""
