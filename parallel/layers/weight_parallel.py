"""Weight-parallel linears and tables: weights are split over an axis and whole only while they are used.

Each of the w ranks of the axis holds the rows [out/w, in] of a weight [out, in], and [out/w] of its bias. Inputs are
[.., .., in] of this rank's own tokens. Every rank's tokens differ, so a gradient is a sum over all ranks.

    forward    all-gather of the weight, product
    backward   all-gather of the weight again; the reduce-scatter of its gradient travels while the input's gradient is
               computed

A bias costs the same three calls again, as in InternEvo: even the gather in backward, whose result no gradient needs.
A block's `Seat` decides which linear starts the gathers, and when (see `parallel.layers.prefetch`). Only the input is
saved for backward. Source: InternEvo `WPFusedDenseFunc` (modes.md 3.6); gradients are sums here, not means (decision
G2).

Embedding and head use whole tables, gathered for each use, on a rank's own tokens. B rows, s = S/p tokens of a row on
this rank, D hidden, V vocabulary; p ranks of the sequence's axis. A rank holds [V, D/w] of the token table (cut along
hidden) or [V/w, D] (along the vocabulary, padded). It holds [V/w, D] of an untied head; a tied head is a token table
cut along the vocabulary.

    call                 | forward                              | backward
    token table          | all_gather                           | all_gather, reduce_scatter
    head weight          | all_gather                           | all_gather, reduce_scatter
    logits head=exchange | all_to_all: [B, s, V] -> [B, S, V/p] | all_to_all
    logits head=gather   | all_gather: [B, s, V] -> [B, S, V]   | own slice
    logits head=local    | -                                    | -

A lookup needs no table in backward. The table is gathered all the same, as in InternEvo, and so the two ledgers agree.
None of these gathers is started ahead of its use. Source: InternEvo `Embedding1D`, `ScaleColumnParallelLinear`
(modes.md 3.3, 3.4); the gradient of a table cut along hidden is reduced along hidden (decision E1).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardproof.parallel.communication import pairs
from shardproof.parallel.communication.collectives import (
    Pending,
    all_gather,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)
from shardproof.parallel.communication.layout import Axis
from shardproof.parallel.layers.embedding import EmbeddingTable
from shardproof.parallel.layers.prefetch import Gathers, Seat


class Supply(Protocol):
    """The source of a product's full weight (see `Seat`)."""

    def edges(self) -> tuple[Tensor, ...]:
        """Tensors that the product depends on in the graph: weight, and bias when there is one."""
        ...

    def forward(self, edges: Sequence[Tensor]) -> list[Tensor]:
        """The full tensors for the product."""
        ...

    def look_back(self) -> AbstractContextManager[None]:
        """A context for the first access to what the product saved."""
        ...

    def backward(self) -> Callable[[], list[Tensor]]:
        """Start the gather for backward; the returned function waits for the full tensors."""
        ...

    def reduce(self, full: Tensor) -> Pending:
        """Start turning the gradient of a full tensor into that of its edge."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The supply of a weight without prefetching."""

    weight: Tensor
    axis: Axis

    def edges(self) -> tuple[Tensor, ...]:
        """The shard."""
        return (self.weight,)

    def forward(self, edges: Sequence[Tensor]) -> list[Tensor]:
        """The full weight, gathered now."""
        return [all_gather(edge, self.axis, dim=0) for edge in edges]

    def look_back(self) -> AbstractContextManager[None]:
        """A context that does nothing."""
        return nullcontext()

    def backward(self) -> Callable[[], list[Tensor]]:
        """Start a gather, which runs during the product for the weight's gradient."""
        pending = start_all_gather(self.weight.detach(), self.axis, dim=0)
        return lambda: [pending.wait()]

    def reduce(self, full: Tensor) -> Pending:
        """Start to sum the gradient over the axis into this rank's shard."""
        return start_reduce_scatter(full, self.axis, dim=0)


class _WeightProduct(torch.autograd.Function):
    """x @ weight^T + bias. Weight and bias come from the supply; their gradients go back to its edges."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, supply: Supply, *edges: Tensor) -> Tensor:
        ctx.supply = supply
        ctx.save_for_backward(x)
        return functional.linear(x, *supply.forward(edges))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        supply: Supply = ctx.supply
        with supply.look_back():
            (x,) = ctx.saved_tensors
        arriving = supply.backward()
        rows = grad.flatten(0, -2)
        reduced = [supply.reduce(rows.t() @ x.flatten(0, -2))]
        if len(ctx.needs_input_grad) > 3:
            reduced.append(supply.reduce(rows.sum(0)))
        weight = arriving()[0]
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_x, None, *(part.wait() for part in reduced)


def weight_product(x: Tensor, supply: Supply) -> Tensor:
    """x @ weight^T, plus the bias when there is one, with the full weight: [.., .., in] -> [.., .., out]."""
    y: Tensor = _WeightProduct.apply(x, supply, *supply.edges())
    return y


class WeightLinear(nn.Module):
    """Linear whose parameters are this rank's rows, [out/w, in] and [out/w]; its output has all features."""

    def __init__(
        self,
        shape: tuple[int, ...],
        gathers: Gathers,
        *,
        block: int,
        leaf: str,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(shape[:1], dtype=dtype, device=device)) if bias else None
        shards = (self.weight,) if self.bias is None else (self.weight, self.bias)
        self.seat: Seat = gathers.seat(block, leaf, shards)

    def forward(self, x: Tensor) -> Tensor:
        """[.., .., in] -> [.., .., out]."""
        return weight_product(x, self.seat)


_SEQUENCE, _VOCABULARY = 1, 2
"""Dims of logits [B, S, V]."""


class _WholeTable(torch.autograd.Function):
    """A table's shard -> the whole table; the gradient goes back as this rank's shard of the sum."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        ctx.save_for_backward(shard)
        whole = all_gather(shard, axis, dim=dim)
        return whole.view_as(whole)  # in a group of one this is the shard itself, which must not be handed out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (shard,) = ctx.saved_tensors
        all_gather(shard, ctx.axis, dim=ctx.dim)
        return reduce_scatter(grad, ctx.axis, dim=ctx.dim), None, None


class WeightEmbedding(nn.Module):
    """Token embedding from a table split over the axis along `dim`, plus learned positions if there are any.

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

    `weights` is the axis of the weights, `sequence` that of the tokens. `shape` is that of the local weight [V/w, D];
    None if the head is tied, and `forward` gets the token table. Only the form `exchange` keeps padded columns; `vocab`
    is the size without them.
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
