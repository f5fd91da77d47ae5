"""Cross entropy over logits whose vocabulary is split over an axis; the mathematics of one rank's whole vocabulary.

Letters: V true vocabulary (K classes of label smoothing), padded columns of the last ranks lie behind it and take no
part. Per token, x = logits - max, Z = sum exp(x), t the label, a the smoothing, b = a/(V-1):

    loss = log Z - (1 - a - b) x_t - b sum_j x_j        gradient_j = exp(x_j)/Z - (1 - a - b) [j = t] - b

Collectives over the axis (`LOSS`) are issued in forward alone, in float32 (float64 for float64 logits). Unfused they
are MAX, SUM x_t, SUM Z and with smoothing SUM x_j, each [tokens]; fused the sums are one.

Sources: Megatron-Core `vocab_parallel_cross_entropy` and its fused form; its smoothing takes K and the mean of one
partition, here both are global (modes.md 4.6, decision S1).
"""

from typing import Any

import torch
from torch import Tensor

from shardproof.parallel.communication.collectives import all_reduce
from shardproof.parallel.communication.expectation import STAGES, CallRow
from shardproof.parallel.communication.mesh import Axis
from shardproof.parallel.layers.norm import wide

IGNORED = -100
"""The label of a token that is never learned."""


class _CrossEntropy(torch.autograd.Function):
    """Per-token loss from this rank's columns; backward needs no collective."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, vocab: int, smoothing: float, fused: bool
    ) -> Tensor:
        columns = logits.shape[-1]
        first = axis.rank * columns
        real = max(0, min(columns, vocab - first))
        x = logits.to(wide(logits.dtype), copy=True)
        x[..., real:] = -torch.inf
        x -= all_reduce(x.amax(-1), axis, op="max")[..., None]

        place = labels - first
        elsewhere = (place < 0) | (place >= real)
        place = place.masked_fill(elsewhere, 0)[..., None]
        hit = x.gather(-1, place)[..., 0].masked_fill(elsewhere, 0)
        every = x[..., :real].sum(-1)
        share = x.exp_()
        terms = [hit, share.sum(-1), every] if smoothing else [hit, share.sum(-1)]
        terms = _summed(terms, axis, fused)

        spread = smoothing / (vocab - 1) if smoothing else 0.0
        loss = terms[1].log() - (1 - smoothing - spread) * terms[0]
        if smoothing:
            loss = loss - spread * terms[2]
        share /= terms[1][..., None]
        ctx.save_for_backward(share, place, elsewhere)
        ctx.real, ctx.peak, ctx.spread, ctx.dtype = real, 1 - smoothing - spread, spread, logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        share, place, elsewhere = ctx.saved_tensors
        slope = share.clone()
        slope[..., : ctx.real] -= ctx.spread
        slope.scatter_add_(-1, place, -ctx.peak * (~elsewhere)[..., None].to(slope.dtype))
        return (slope * grad[..., None]).to(ctx.dtype), None, None, None, None, None


def _summed(terms: list[Tensor], axis: Axis, fused: bool) -> list[Tensor]:
    """Every term summed over the axis, in one call or in one call each."""
    if fused:
        return list(all_reduce(torch.stack(terms), axis))
    return [all_reduce(term, axis) for term in terms]


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, axis: Axis, *, vocab: int, smoothing: float = 0.0, fused: bool = False
) -> Tensor:
    """The loss of every token, [...], from this rank's columns [..., V/p]; on an axis of one rank it is the plain one.

    Labels [...] outside 0..vocab-1 (IGNORED) give a finite number that `counted` weighs with 0.
    """
    loss: Tensor = _CrossEntropy.apply(logits, labels, axis, vocab, smoothing, fused)
    return loss


def counted(labels: Tensor, loss_mask: Tensor) -> Tensor:
    """The weight with which every token counts: its loss mask, 0 where the label is IGNORED."""
    return loss_mask * (labels != IGNORED)


def _loss(op: str, elements: str, why: str, when: str) -> CallRow:
    split = 'last and head in ("parallel", "exchange")'
    return CallRow(STAGES, "loss", op, elements, why, dtype="loss", when=f"{split} and {when}")


LOSS = (
    _loss("all_reduce max", "slice_tokens", "largest logit of every token", "True"),
    _loss("all_reduce", "slice_tokens", "logit of the label", 'cross_entropy == "unfused"'),
    _loss("all_reduce", "slice_tokens", "sum of exp", 'cross_entropy == "unfused"'),
    _loss("all_reduce", "slice_tokens", "sum of logits", 'cross_entropy == "unfused" and label_smoothing'),
    _loss("all_reduce", "2 * slice_tokens", "both sums", 'cross_entropy == "fused" and not label_smoothing'),
    _loss("all_reduce", "3 * slice_tokens", "all three sums", 'cross_entropy == "fused" and label_smoothing'),
)
"""The loss of logits whose vocabulary is split over tp."""
LOGITS = (
    CallRow("head", "forward", "all_gather", "slice_tokens * padded_vocab", "logits", when='head == "gather"'),
    *LOSS,
)
"""Calls behind a head that splits the vocabulary over tp: its logits are gathered, or their loss is split too."""
