"""isp: InternEvo's weight parallelism with split sequences. Hidden states [B, S, D] are split on S over tp all the way;
weights are split over wp, gathered whole for each use. tp and wp are sizes of their own over the same ranks.

A block's gathers belong to the linear that starts them: its own one, or with prefetch another (the table of
`parallel.layers.prefetch`). Nothing is gathered ahead for another stage of a pipeline. Reduce-scatters belong to the
linear, fused to the block's first. Every gather but that of a table is shared by recompute and backward where it is
prefetched or fused. Source: InternEvo (modes.md 2, 3.3 to 3.7; its means are sums here, decision G2). With head=local
per-token losses are gathered, as in InternEvo, so that the outcome of every rank is the whole micro-batch's.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from shardproof.parallel.communication.batch import DELIVERY
from shardproof.parallel.communication.expectation import STAGES, CallPlace, CallRow, Places
from shardproof.parallel.layers.loss import LOSS
from shardproof.parallel.layers.roles import ATTENTION, linears
from shardproof.parallel.model.strategy import Strategy
from shardproof.parallel.schedules.stages import computed_again, stages
from shardproof.parallel.schemes import weight_parallel
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import Shape, shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gather:
    """A gather of block weights: its elements, the linear that owns them, the linears that start it in either pass.

    `ahead`: whether a product lies between issue and use, forward and backward. `again`: its block is recomputed.
    """

    elements: int
    owner: str
    starts: tuple[str, str]
    ahead: tuple[bool, bool]
    again: bool


def _gathers(case: Case, layers: Sequence[int], full: dict[str, Shape]) -> Iterator[_Gather]:
    """The gathers of these consecutive layers, all of a stage's: each stage begins and ends as a whole model does."""
    blocks = {layer: [linear for linear in linears(case) if linear.startswith(f"layers.{layer}.")] for layer in layers}
    order, first, last, recomputed = [*itertools.chain(*blocks.values())], layers[0], layers[-1], computed_again(case)
    following = dict(zip(order, [*order[1:], order[-1]], strict=True))
    for layer, own in blocks.items():
        again = layer in recomputed
        by_block = case.fuse_weights or (case.overlap and again)
        before = f"layers.{layer - 1}.attention.wo" if layer > first else own[0]
        later = blocks[min(layer + 1, last)] if case.overlap else own
        sizes = {
            linear: [math.prod(full[name]) for name in (f"{linear}.weight", f"{linear}.bias") if name in full]
            for linear in own
        }
        if case.fuse_weights:
            sizes = {own[0]: [sum(itertools.chain(*sizes.values()))]}
        for linear, elements in sizes.items():
            one_by_one = following[linear] if case.overlap else linear
            starts = before if case.overlap else linear, later[-1] if by_block else one_by_one
            # The first linear of a block that started all of its gathers waits before anything is computed.
            at_once = linear != own[0]
            ahead = layer > first or at_once, not again or layer < last or at_once
            for size in elements:
                yield _Gather(
                    elements=size,
                    owner=linear,
                    starts=starts,
                    ahead=(case.overlap and ahead[0], case.overlap and ahead[1]),
                    again=again,
                )


def _weights(case: Case, start: int | None = None) -> Iterator[CallPlace]:
    """Weights of blocks: at the linears that start their gathers, forward (0) or backward (1), or at their own."""
    full = shapes(case)
    for stage in stages(case):
        for one in _gathers(case, stage.layers, full):
            values = {"weights": one.elements, "again": one.again, "ahead": start is not None and one.ahead[start]}
            yield CallPlace(module=one.owner if start is None else one.starts[start], at=stage.at, values=values)


def _table(module: str, elements: str, *, hidden: str = "False") -> tuple[CallRow, ...]:
    """A table that its module gathers itself."""
    return (
        CallRow(module, "forward", "all_gather", elements, "the whole table", axis="wp"),
        CallRow(module, "backward", "all_gather", elements, "the whole table", axis="wp", hidden=hidden),
        CallRow(module, "backward", "reduce_scatter", elements, "gradient of the table", axis="wp", hidden=hidden),
    )


def _block(where: Places, phase: str, op: str, why: str, *, hidden: str = "False", when: str = "True") -> CallRow:
    return CallRow(where, phase, op, "weights", why, axis="wp", hidden=hidden, when=when, again="")


_SHARED = "overlap or fuse_weights"
_QUERIES = "slice_tokens // tp * heads * head_dim"
_KEYS = "slice_tokens // tp * 2 * max(kv_heads, tp) * head_dim"
_LOGITS = "slice_tokens // tp * padded_vocab"
_BOTH, _OWN = "forward backward", 'last and head == "local"'
_ROWS = (
    *DELIVERY,
    *_table("embedding", 'hidden * (padded_vocab if embedding == "vocab" else vocab)'),
    _block(partial(_weights, start=0), "forward", "all_gather", "whole weights, or biases", hidden="ahead"),
    _block(partial(_weights, start=1), "backward", "all_gather", "whole weights, or biases", hidden="ahead"),
    _block(_weights, "backward", "reduce_scatter", "their gradients", hidden="overlap and not fuse_weights"),
    _block(_weights, "recompute", "all_gather", "whole weights, or biases", when=f"again and not ({_SHARED})"),
    CallRow(ATTENTION, _BOTH, "all_to_all", _QUERIES, "tokens of queries for heads"),
    CallRow(ATTENTION, _BOTH, "all_to_all", _KEYS, "tokens of keys and values for heads"),
    CallRow(ATTENTION, _BOTH, "all_to_all", _QUERIES, "heads of the context for tokens"),
    *_table("head", "hidden * padded_vocab", hidden="overlap"),
    CallRow("head", _BOTH, "all_to_all", _LOGITS, "tokens of logits for columns", when='head == "exchange"'),
    *LOSS,
    CallRow("head", "forward", "all_gather", "slice_tokens * vocab", "logits of all tokens", when='head == "gather"'),
    CallRow(STAGES, "loss", "all_gather", "slice_tokens", "losses of all tokens", dtype="loss", when=_OWN),
)


ISP = Strategy(
    name="isp",
    sequence_dim=1,
    placements=weight_parallel.placements,
    activation=weight_parallel.activation,
    partial=weight_parallel.partial,
    coalesced=False,
    parts=weight_parallel.parts,
    rows=_ROWS,
    weight_axis="wp",
    data_axes=("wdp",),
    loss_axes=("dp",),
)
