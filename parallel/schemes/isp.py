"""isp: InternEvo's weight parallelism with split sequences. Hidden states [B, S, D] are split on S over tp all the way;
weights are split over wp, gathered whole for each use. tp and wp are sizes of their own over the same ranks.

    tensor                                   | axis | forward      | recompute  | backward                   | bytes
    embedding                                | wp   | all_gather   | -          | all_gather, reduce_scatter | K
    linear overlap=false fuse_weights=false  | wp   | all_gather   | all_gather | all_gather, reduce_scatter | K
    linear overlap=true fuse_weights=false   | wp   | all_gather   | -          | all_gather, reduce_scatter | K
    bias overlap=false fuse_weights=false    | wp   | all_gather   | all_gather | all_gather, reduce_scatter | k
    bias overlap=true fuse_weights=false     | wp   | all_gather   | -          | all_gather, reduce_scatter | k
    block fuse_weights=true                  | wp   | all_gather   | -          | all_gather, reduce_scatter | K+k
    layers.*.attention: q                    | tp   | all_to_all   | all_to_all | all_to_all                 | A/p
    layers.*.attention: k and v              | tp   | all_to_all   | all_to_all | all_to_all                 | KV/p
    layers.*.attention: context              | tp   | all_to_all   | all_to_all | all_to_all                 | A/p
    head                                     | wp   | all_gather   | -          | all_gather, reduce_scatter | K
    head head=exchange                       | tp   | all_to_all   | -          | all_to_all                 | V/p
    head head=gather                         | tp   | all_gather   | -          | -                          | v
    loss head=exchange cross_entropy=unfused | tp   | 3 all_reduce | -          | -                          | T
    loss head=exchange cross_entropy=fused   | tp   | all_reduce   | -          | -                          | T
    loss head=exchange cross_entropy=fused   | tp   | all_reduce   | -          | -                          | 2*T
    loss head=local                          | tp   | all_gather   | -          | -                          | T
    step: each norm, learned positions       | wp   | -            | -          | all_reduce                 | N
    step: all gradients                      | wdp  | -            | -          | all_reduce                 | G
    step: loss, tokens                       | dp   | -            | -          | all_reduce                 | 16
    step: squared norm                       | wp   | -            | -          | all_reduce                 | W

One row a tensor and micro-batch on the pipeline stage that holds it, `step` once a step; `recompute` holds for
recompute=full. p = tp. Bytes of: K the whole weight (the embedding's and a tied head's: the whole padded table), k the
whole bias, K+k all of a block; A one whole activation; KV = B*S*2*max(kv_heads, p)*head_dim numbers; V the padded
logits, v the true ones; T one number a token in the loss's dtype, W one; N the parameter; G all gradients of a rank.
Label smoothing adds one term to the loss.

Regions: a call of attention, head, embedding and loss belongs to that module. A block's gathers belong to the linear
that starts them: its own one, or with prefetch another (the table of `parallel.weights.prefetch`). Reduce-scatters
belong to the linear, fused to the block's first.
Source: InternEvo (modes.md 2, 3.3 to 3.7; its means are sums here, decision G2). The doc-era loss (head=local) gathers
per-token losses, and so does ours: then the outcome of every rank is the whole micro-batch's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from parallel.communication.expectation import (
    ITEM_BYTES,
    CompleteTerm,
    delivery_terms,
    loss_dtype,
    loss_terms,
    per_micro,
    repeated,
    step_terms,
)
from parallel.layers.roles import attention_linears, mlp_linears
from parallel.model.strategy import Strategy
from parallel.schedules.recompute import computed_again
from parallel.schedules.stages import stages
from parallel.schemes import weight_parallel
from reference.case import Case
from reference.model.parameters import Shape, shapes

__all__ = ["ISP"]


def _expected(case: Case) -> Iterator[CompleteTerm]:
    """Per layer and micro-batch, without biases: forward C+2 all-gathers and 3 all-to-alls; backward
    the same and C+2 reduce-scatters; recompute 3 all-to-alls and, without overlap, C+2 all-gathers. Fused, 1 for C+2.
    """
    yield from delivery_terms(case)
    table = case.hidden * ITEM_BYTES[case.dtype]
    yield from _weight(case, "embedding", table * (case.padded_vocab if case.embedding == "vocab" else case.vocab))
    yield from _block_weights(case)
    yield from _exchanges(case)
    yield from _weight(case, "head", table * case.padded_vocab, hidden=case.overlap)
    yield from _logits(case)


def _weight(case: Case, region: str, payload_bytes: int, *, hidden: bool = False) -> Iterator[CompleteTerm]:
    """A table that its module gathers itself, forward and backward; `hidden` are the calls of backward."""
    yield from per_micro(case, "forward", region, "all_gather", payload_bytes, axis="wp")
    for op in ("all_gather", "reduce_scatter"):
        yield from per_micro(case, "backward", region, op, payload_bytes, axis="wp", hidden=hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One gather of block weights: what travels, and the linears that start it forward and backward.

    `ahead`: whether a product lies between issue and use, forward and backward. `again`: its block is recomputed.
    """

    payload_bytes: int
    owner: str
    forward: str
    backward: str
    ahead: tuple[bool, bool]
    again: bool


def _block_weights(case: Case) -> Iterator[CompleteTerm]:
    """All-gathers and reduce-scatters of the blocks; who starts a gather: `parallel.weights.prefetch`."""
    shared = case.overlap or case.fuse_weights
    for call in _calls(case):
        size = call.payload_bytes
        ahead = dict(zip(("forward", "backward"), call.ahead, strict=True))
        for phase, linear in (("forward", call.forward), ("backward", call.backward)):
            yield from per_micro(case, phase, linear, "all_gather", size, axis="wp", hidden=ahead[phase])
        hidden = case.overlap and not case.fuse_weights
        yield from per_micro(case, "backward", call.owner, "reduce_scatter", size, axis="wp", hidden=hidden)
        if call.again and not shared:
            yield from per_micro(case, "recompute", call.owner, "all_gather", size, axis="wp")


def _calls(case: Case) -> Iterator[_Call]:
    """Nothing is gathered ahead for another stage of a pipeline: each begins and ends as a whole model does."""
    again, full = computed_again(case), shapes(case)
    for stage in stages(case):
        yield from _calls_of_layers(case, stage.layers, again, full)


def _calls_of_layers(
    case: Case, layers: Sequence[int], again: Container[int], full: dict[str, Shape]
) -> Iterator[_Call]:
    """The gathers of these consecutive layers, all of a stage's."""
    blocks = {layer: _linears(case, layer) for layer in layers}
    order = list(itertools.chain(*blocks.values()))
    following = dict(zip(order, [*order[1:], order[-1]], strict=True))
    first, last = layers[0], layers[-1]
    for layer, linears in blocks.items():
        later = blocks[min(layer + 1, last)] if case.overlap else linears
        before = f"layers.{layer - 1}.attention.wo" if layer > first else linears[0]
        recomputed = layer in again
        by_block = case.fuse_weights or (case.overlap and recomputed)
        if case.fuse_weights:
            size = sum(itertools.chain(*(_bytes(case, full, linear) for linear in linears)))
            forward = before if case.overlap else linears[0]
            ahead = case.overlap and layer > first, case.overlap and (not recomputed or layer < last)
            backward = later[-1]
            yield _Call(
                payload_bytes=size,
                owner=linears[0],
                forward=forward,
                backward=backward,
                ahead=ahead,
                again=recomputed,
            )
            continue
        for linear in linears:
            one_by_one = following[linear] if case.overlap else linear
            backward = later[-1] if by_block else one_by_one
            forward = before if case.overlap else linear
            # The first linear of a block that started all of its gathers waits before anything is computed.
            waits = linear == linears[0]
            ahead = (
                case.overlap and (layer > first or not waits),
                case.overlap and (not by_block or layer < last or not waits),
            )
            for size in _bytes(case, full, linear):
                yield _Call(
                    payload_bytes=size,
                    owner=linear,
                    forward=forward,
                    backward=backward,
                    ahead=ahead,
                    again=recomputed,
                )


def _linears(case: Case, layer: int) -> list[str]:
    """The linears of one layer in forward order."""
    attention = [f"layers.{layer}.attention.{leaf}" for leaf in attention_linears(case)]
    return attention + [f"layers.{layer}.mlp.{leaf}" for leaf in mlp_linears(case)]


def _bytes(case: Case, full: dict[str, Shape], linear: str) -> list[int]:
    """Bytes of a linear's whole weight and, when there is one, of its bias."""
    item = ITEM_BYTES[case.dtype]
    names = [f"{linear}.weight", f"{linear}.bias"]
    return [math.prod(full[name]) * item for name in names if name in full]


def _exchanges(case: Case) -> Iterator[CompleteTerm]:
    """All-to-alls of attention: q, k and v packed, context."""
    tokens, item = case.slice_tokens // case.tp, ITEM_BYTES[case.dtype]
    q = tokens * case.heads * case.head_dim * item
    kv = tokens * 2 * max(case.kv_heads, case.tp) * case.head_dim * item
    for layer, size in itertools.product(range(case.layers), (q, kv, q)):
        yield from repeated(case, per_micro(case, "forward", f"layers.{layer}.attention", "all_to_all", size))
        yield from per_micro(case, "backward", f"layers.{layer}.attention", "all_to_all", size)


def _logits(case: Case) -> Iterator[CompleteTerm]:
    """What happens to logits and losses, by the form of the head."""
    item = ITEM_BYTES[case.dtype]
    match case.head:
        case "exchange":
            size = case.slice_tokens // case.tp * case.padded_vocab * item
            for phase in ("forward", "backward"):
                yield from per_micro(case, phase, "head", "all_to_all", size)
            yield from loss_terms(case)
        case "gather":
            yield from per_micro(case, "forward", "head", "all_gather", case.slice_tokens * case.vocab * item)
        case "local":
            dtype = loss_dtype(case)
            yield from per_micro(case, "loss", "", "all_gather", case.slice_tokens * ITEM_BYTES[dtype], dtype=dtype)


ISP = Strategy(
    name="isp",
    sequence_dim=1,
    placements=weight_parallel.placements,
    activation=weight_parallel.activation,
    partial=weight_parallel.partial,
    coalesced=False,
    parts=weight_parallel.parts,
    expected=_expected,
    once=step_terms(
        weight_parallel.placements,
        weight_parallel.partial,
        weight_axis="wp",
        data_axes=("wdp",),
        loss_axes=("dp",),
        coalesced=False,
    ),
    weight_axis="wp",
    data_axes=("wdp",),
    loss_axes=("dp",),
)
