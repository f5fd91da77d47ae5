"""Embedding and head of a tensor-parallel model: tables split over the axis, hidden states whole or split behind them.

Letters: B sequences, S tokens of a sequence, D hidden, V vocabulary (padded where it is split), p ranks of the axis.
Token and position ids arrive as [B, S]; hidden states leave with the sequence at `sequence_dim` (0: [S, B, D], 1: [B,
S, D]). A token table lies [V/p, D] (along the vocabulary) or [V, D/p] (along hidden); the head lies [V/p, D].

    table      | hidden states | positions | forward                    | backward
    vocabulary | whole         | any       | all-reduce                 | -
    vocabulary | split         | learned   | all-reduce, then own slice | all-gather
    vocabulary | split         | rope      | reduce-scatter             | all-gather
    hidden     | whole         | any       | all-gather                 | own columns
    hidden     | split         | any       | all-gather, then own slice | all-gather, then own columns
    whole      | whole         | any       | -                          | -

The learned positions are whole on every rank and are added to whole hidden states, which is why they cost the larger
call. Sources: Megatron-Core `VocabParallelEmbedding`, `reduce_scatter_embeddings` (modes.md 4.3, 4.6); InternEvo
`Embedding1D` (modes.md 3.3).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardproof.parallel.communication import pairs
from shardproof.parallel.layers.linear import Region, column_linear


class EmbeddingTable(nn.Module):
    """A holder of one weight [rows, D]. The module around it looks it up, so that the calls belong to that module."""

    def __init__(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def vocabulary_rows(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """Rows of a table whose first row has the id `first`; zero for ids that lie elsewhere. [...] -> [..., D]."""
    local = ids - first
    outside = (local < 0) | (local >= weight.shape[0])
    return functional.embedding(local.masked_fill(outside, 0), weight).masked_fill(outside[..., None], 0)


class _Embedding(nn.Module):
    """The fields of both forms: `tokens`, this rank's table, and `positions`, the whole [seq, D] or None."""

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
        self.tokens = EmbeddingTable(tokens, dtype=dtype, device=device)
        self.positions = None if positions is None else EmbeddingTable(positions, dtype=dtype, device=device)

    def _laid_out(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.transpose(0, 1) if self.sequence_dim == 0 else x_BSD

    def _from_whole(self, x_BSD: Tensor, positions_BS: Tensor) -> Tensor:
        """Whole token rows -> hidden states, learned positions added when there are any."""
        if self.positions is not None:
            x_BSD = x_BSD + functional.embedding(positions_BS, self.positions.weight)
        x = self._laid_out(x_BSD)
        if self.region.sequence_dim is None:
            return x
        return pairs.scatter_to_sequence(x, self.region.axis, dim=self.region.sequence_dim)


class VocabularyEmbedding(_Embedding):
    """Token embedding split along the vocabulary; `tokens` is this rank's [V/p, D]."""

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """Hidden states [S, B, D] or [B, S, D]; those of this rank's part of the sequence when they are split."""
        region = self.region
        x_BSD = vocabulary_rows(tokens_BS, self.tokens.weight, region.axis.rank * self.tokens.weight.shape[0])
        if self.positions is None:
            return region.leave(self._laid_out(x_BSD))
        x_BSD = pairs.reduce_from(x_BSD, region.axis)
        return self._from_whole(x_BSD, positions_BS)


class HiddenEmbedding(_Embedding):
    """Token embedding split along hidden; `tokens` is this rank's [V, D/p], every rank looks up every token."""

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """Hidden states [S, B, D] or [B, S, D]; those of this rank's part of the sequence when they are split."""
        columns = functional.embedding(tokens_BS, self.tokens.weight)
        return self._from_whole(pairs.gather_from(columns, self.region.axis), positions_BS)


class WholeEmbedding(_Embedding):
    """Token embedding from a table `tokens` [V, D] that every rank holds whole; hidden states are whole too."""

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """Hidden states [S, B, D] or [B, S, D]. No call is issued: the gradient of the table is whole on every rank."""
        return self._from_whole(functional.embedding(tokens_BS, self.tokens.weight), positions_BS)


class Head(nn.Module):
    """Logits of this rank's vocabulary rows, [.., .., V/p] over the whole sequence: a column linear without bias.

    The weight is its own, or (tied) the embedding's, handed to `forward`. With `gather_output` every rank gets the
    logits of the whole true vocabulary `vocab`, without padded columns (forward all-gather, backward own slice).
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
