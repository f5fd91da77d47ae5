"""Embedding and head of a weight-parallel model: whole tables for a rank's own tokens, gathered for each use.

Letters: B rows, s = S/p tokens of a row on this rank, D hidden, V vocabulary. w ranks of the weights' axis, p of the
sequence's. The token table lies [V, D/w] (cut along hidden) or [V/w, D] (along the vocabulary). A head of its own lies
[V/w, D]; a tied one is a token table of that form. Cuts along the vocabulary pad it.

    call                 | forward                              | backward
    token table          | all_gather                           | all_gather, reduce_scatter
    head weight          | all_gather                           | all_gather, reduce_scatter
    logits head=exchange | all_to_all: [B, s, V] -> [B, S, V/p] | all_to_all
    logits head=gather   | all_gather: [B, s, V] -> [B, S, V]   | own slice
    logits head=local    | -                                    | -

A lookup needs no table in backward; it is gathered all the same, as InternEvo does, so that the two ledgers agree. No
gather here is started ahead of its use. Source: InternEvo `Embedding1D`, `ScaleColumnParallelLinear` (modes.md 3.3,
3.4); the gradient of a table cut along hidden is reduced along hidden (decision E1).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardproof.parallel.communication import pairs
from shardproof.parallel.communication.collectives import all_gather, reduce_scatter
from shardproof.parallel.communication.mesh import Axis
from shardproof.parallel.layers.embedding import EmbeddingTable
from shardproof.parallel.weights.linear import Alone, weight_product

_SEQUENCE, _VOCABULARY = 1, 2
"""Dims of logits [B, S, V]."""


class _WholeTable(torch.autograd.Function):
    """A table's shard -> the whole table; the gradient goes back as this rank's shard of the sum."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        ctx.save_for_backward(shard)
        whole = all_gather(shard, axis, dim=dim)
        return whole.view_as(whole)  # in a group of one it is the shard itself, which must not be handed back

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (shard,) = ctx.saved_tensors
        all_gather(shard, ctx.axis, dim=ctx.dim)
        return reduce_scatter(grad, ctx.axis, dim=ctx.dim), None, None


class WeightEmbedding(nn.Module):
    """Token embedding from a table split over the axis along `dim`, plus learned positions when there are any.

    `tokens` is this rank's table, `positions` the whole [seq, D] or None for rotary positions.
    """

    def __init__(
        self,
        tokens: tuple[int, ...],
        positions: tuple[int, ...] | None,
        axis: Axis,
        *,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.axis, self.dim = axis, dim
        self.tokens = EmbeddingTable(tokens, dtype=dtype, device=device)
        self.positions = None if positions is None else EmbeddingTable(positions, dtype=dtype, device=device)

    def forward(self, tokens_Bs: Tensor, positions_Bs: Tensor) -> Tensor:
        """Hidden states [B, s, D] of this rank's tokens; the lookup saves ids, never the table."""
        x_BsD = functional.embedding(tokens_Bs, _WholeTable.apply(self.tokens.weight, self.axis, self.dim))
        if self.positions is None:
            return x_BsD
        return x_BsD + functional.embedding(positions_Bs, self.positions.weight)


class WeightHead(nn.Module):
    """Logits of this rank's tokens, then in the case's form (see the table above).

    `weights` is the axis of the weights, `sequence` that of the tokens; `shape` the local weight [V/w, D]. Without it
    the head is tied: `forward` gets the token table. Only `exchange` keeps padded columns; `vocab` is the true one.
    """

    def __init__(
        self,
        shape: tuple[int, ...] | None,
        weights: Axis,
        sequence: Axis,
        *,
        form: str,
        vocab: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weights, self.sequence, self.form, self.vocab = weights, sequence, form, vocab
        self.weight = None if shape is None else nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

    def forward(self, x_BsD: Tensor, tied_weight: Tensor) -> Tensor:
        """[B, s, D] -> [B, S, V/p] | [B, S, V] | [B, s, V]."""
        weight = tied_weight if self.weight is None else self.weight
        logits = weight_product(x_BsD, Alone(weight=weight, axis=self.weights))
        if self.form == "exchange":
            return pairs.all_to_all(logits, self.sequence, split_dim=_VOCABULARY, gather_dim=_SEQUENCE)
        logits = logits[..., : self.vocab]
        if self.form == "local":
            return logits
        return pairs.gather_from_sequence(logits, self.sequence, dim=_SEQUENCE, tensor_parallel_output_grad=False)
