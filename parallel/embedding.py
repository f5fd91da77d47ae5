"""Vocabulary-parallel embedding and head: every rank holds V/p consecutive rows of the (padded) vocabulary.

Letters: B sequences, S tokens of a sequence, D hidden, V padded vocabulary. Token and position ids arrive as [B, S];
hidden states leave with the sequence at `sequence_dim` (0: [S, B, D], 1: [B, S, D]).

    hidden states | positions | forward                           | backward
    whole         | any       | all-reduce                        | -
    split         | learned   | all-reduce, then own slice        | all-gather
    split         | rope      | reduce-scatter                    | all-gather

The learned positions are whole on every rank and are added to the whole sum, which is why they cost the larger call.
Source: Megatron-Core `VocabParallelEmbedding`, `reduce_scatter_embeddings` (modes.md 4.3, 4.6).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel import pairs
from parallel.linear import Region, column_linear

__all__ = ["Head", "Table", "VocabularyEmbedding", "vocabulary_rows"]


class Table(nn.Module):
    """A holder of one weight [rows, D], looked up by the module around it, so that the calls belong to that module."""

    def __init__(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def vocabulary_rows(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """Rows of a table whose first row has the id `first`; zero for ids that lie elsewhere. [...] -> [..., D]."""
    local = ids - first
    outside = (local < 0) | (local >= weight.shape[0])
    return functional.embedding(local.masked_fill(outside, 0), weight).masked_fill(outside[..., None], 0)


class VocabularyEmbedding(nn.Module):
    """Token embedding split over the region's axis, plus learned positions when there are any.

    `tokens` is this rank's [V/p, D], `positions` the whole [seq, D] or None for rotary positions.
    """

    def __init__(
        self,
        tokens: tuple[int, ...],
        positions: tuple[int, ...] | None,
        region: Region,
        *,
        sequence_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.region, self.sequence_dim = region, sequence_dim
        self.tokens = Table(tokens, dtype=dtype, device=device)
        self.positions = None if positions is None else Table(positions, dtype=dtype, device=device)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """Hidden states [S, B, D] or [B, S, D]; of this rank's part of the sequence when they are split."""
        region = self.region
        x_BSD = vocabulary_rows(tokens_BS, self.tokens.weight, region.axis.rank * self.tokens.weight.shape[0])
        if self.positions is None:
            return region.leave(self._laid_out(x_BSD))
        x_BSD = pairs.reduce_from(x_BSD, region.axis)
        x = self._laid_out(x_BSD + functional.embedding(positions_BS, self.positions.weight))
        if region.sequence_dim is None:
            return x
        return pairs.scatter_to_sequence(x, region.axis, dim=region.sequence_dim)

    def _laid_out(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.transpose(0, 1) if self.sequence_dim == 0 else x_BSD


class Head(nn.Module):
    """Logits of this rank's vocabulary rows, [.., .., V/p] over the whole sequence: a column linear without bias.

    The weight is its own or, tied, the embedding's, handed to `forward`. `gather_output` returns the logits of the
    whole true vocabulary `vocab` on every rank (forward all-gather, backward own slice); no padded column is among
    them.
    """

    def __init__(
        self,
        shape: tuple[int, ...] | None,
        region: Region,
        *,
        vocab: int,
        gather_output: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.region, self.vocab, self.gather_output = region, vocab, gather_output
        self.weight = None if shape is None else nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

    def forward(self, x: Tensor, tied_weight: Tensor) -> Tensor:
        """Hidden states -> logits; `tied_weight` [V/p, D] is used when the head has no weight of its own."""
        weight = tied_weight if self.weight is None else self.weight
        logits = column_linear(x, weight, None, self.region)
        if self.gather_output:
            logits = pairs.gather_from(logits, self.region.axis)[..., : self.vocab]
        return logits
