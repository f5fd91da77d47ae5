"""Pieces that deviate from the right mathematics as real systems do: what `parallel.variants` puts in place of ours.

Nothing here is used unless a case names a variant. Letters as in the modules that each piece stands in for.
Sources: modes.md 2, 3.3, 3.4, 4.6 and 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel.communication import pairs
from parallel.communication.collectives import (
    Pending,
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)
from parallel.communication.mesh import Axis
from parallel.layers.linear import Region
from parallel.layers.norm import wide
from parallel.weights.tables import WeightEmbedding

__all__ = ["FlatRegion", "ScrambledEmbedding", "smoothed_by_parts"]


def _flat_gather(x: Tensor, axis: Axis, *, overlap: bool) -> Pending:
    """Every rank's flat memory end to end, read as if gathered along dim 1: right for one row alone."""
    arriving = start_all_gather(x.flatten(), axis, dim=0, overlap=overlap)
    return Pending(None, lambda: arriving.wait().view(x.shape[0], axis.size * x.shape[1], *x.shape[2:]))


def _flat_scatter(y: Tensor, axis: Axis, *, overlap: bool) -> Pending:
    """Equal parts of the flat memory of a sum, read as if scattered along dim 1."""
    arriving = start_reduce_scatter(y.flatten(), axis, dim=0, overlap=overlap)
    return Pending(None, lambda: arriving.wait().view(y.shape[0], y.shape[1] // axis.size, *y.shape[2:]))


class _FlatScatter(torch.autograd.Function):
    """Partial -> split on flat memory; backward gathers flat memory."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _flat_scatter(y, axis, overlap=False).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _flat_gather(grad.contiguous(), ctx.axis, overlap=False).wait(), None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRegion(Region):
    """A region of [B, S, D] hidden states whose collectives along dim 1 ignore that dim 0 lies outside of it."""

    def leave(self, y: Tensor) -> Tensor:
        """Partial sums -> hidden states."""
        split: Tensor = _FlatScatter.apply(y, self.axis)
        return split

    def gathered(self, x: Tensor) -> Tensor:
        """Hidden states whole on this rank, rows mixed."""
        return _flat_gather(x, self.axis, overlap=False).wait()

    def start_gather(self, x: Tensor) -> Pending:
        """The same, during a GEMM."""
        return _flat_gather(x, self.axis, overlap=self.overlap)

    def start_reduce(self, grad: Tensor, *, overlap: bool) -> Pending:
        """This rank's part of the flat memory of the gradient's sum."""
        return _flat_scatter(grad, self.axis, overlap=overlap)


class _ScrambledTable(torch.autograd.Function):
    """Columns [V, D/w] -> the whole table; of the flat gradient every rank takes rows, and reads them as columns."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        ctx.save_for_backward(shard)
        return all_gather(shard, axis, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (shard,) = ctx.saved_tensors
        all_gather(shard, ctx.axis, dim=1)
        return reduce_scatter(grad.flatten(), ctx.axis, dim=0).view_as(shard), None


class ScrambledEmbedding(nn.Module):
    """A `WeightEmbedding` cut along hidden whose gradient is scattered along the rows of flat memory."""

    def __init__(self, right: WeightEmbedding) -> None:
        super().__init__()
        self.axis, self.tokens, self.positions = right.axis, right.tokens, right.positions

    def forward(self, tokens_Bs: Tensor, positions_Bs: Tensor) -> Tensor:
        """Hidden states [B, s, D], which are right."""
        x_BsD = functional.embedding(tokens_Bs, _ScrambledTable.apply(self.tokens.weight, self.axis))
        if self.positions is None:
            return x_BsD
        return x_BsD + functional.embedding(positions_Bs, self.positions.weight)


def smoothed_by_parts(logits: Tensor, labels: Tensor, axis: Axis, *, vocab: int, smoothing: float) -> Tensor:
    """Every token's loss with label smoothing over this rank's columns only: another loss on every rank.

    With K columns here and a = smoothing the label gets 1 - a, every other of these K classes a/(K-1). Collectives:
    MAX, SUM of the label's logit, SUM of exp; the mean over all classes that would be a fourth is not taken.
    """
    first = axis.rank * logits.shape[-1]
    real = max(0, min(logits.shape[-1], vocab - first))
    column = torch.arange(logits.shape[-1], device=logits.device)
    x = logits.to(wide(logits.dtype)).masked_fill(column >= real, -torch.inf)
    x = x - all_reduce(x.detach().amax(-1), axis, op="max")[..., None]
    elsewhere = (labels < first) | (labels >= first + real)
    place = (labels - first).masked_fill(elsewhere, 0)[..., None]
    hit = pairs.reduce_from(x.gather(-1, place)[..., 0].masked_fill(elsewhere, 0), axis)
    total = pairs.reduce_from(x.exp().sum(-1), axis)
    spread = smoothing / (max(real, 2) - 1)
    return total.log() - (1 - smoothing - spread) * hit - spread * x[..., :real].sum(-1)
