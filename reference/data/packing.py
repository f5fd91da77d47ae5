"""Sentences to packs or rows: InternEvo's data path as pure functions.

A sentence is an int64 tensor [tokens]; a label is the next token of its sentence, IGNORED (-100) where there is none.
Padding is token 0 with label -100. A negative token is a prompt.

Sources: the InternEvo page "Data Load and Procedure" and EVO `data/tokenized/packed_dataset.py`, `collaters.py`,
`data/utils.py`. Where page and code disagree, this is the way that loses nothing. The last tokens are kept (page), and
tokens beyond a row are the next one (neither). A label 0 is learned as any other token (page).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

IGNORED = -100
"""The label of a token that is not learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of tokens before anything is masked: `tokens`, `labels` and `positions` int64 [B, S]; prompts are negative.

    A pack is one row, [1, P]. Its `cu_seqlens` int64 [sub-sequences + 1], from 0 to P, are the borders of
    sub-sequences, which attend to themselves only. Its positions are those in the sub-sequence.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor | None


def build_pack(sentences: Sequence[Tensor], *, packed_length: int, seq_len: int) -> list[Rows]:
    """All packs of these sentences, filled without a gap; at least one token.

    A sentence that crosses the end of a pack is cut: its last label there is its own next token. The rest begins the
    next pack as a sub-sequence of its own. A piece above seq_len is cut into sub-sequences of seq_len tokens, its
    labels running through the cuts. Padding is one more sub-sequence, which may be longer than seq_len. Empty sentences
    leave no trace.
    """
    tokens = torch.cat(list(sentences))
    ends = sorted({*accumulate(map(len, sentences))} - {0})
    labels = _next_tokens(tokens)
    labels[torch.tensor(ends, device=tokens.device) - 1] = IGNORED
    packs = []
    for start in range(0, len(tokens), packed_length):
        stop = min(start + packed_length, len(tokens))
        edges = [*(end - start for end in ends if start < end < stop), stop - start]
        packs.append(_pack(tokens[start:stop], labels[start:stop], edges, packed_length, seq_len))
    return packs


def _pack(tokens: Tensor, labels: Tensor, edges: list[int], packed_length: int, seq_len: int) -> Rows:
    """The pack of the pieces that end at these edges, its padding added."""
    borders = [0]
    for edge in edges:
        borders += [*range(borders[-1] + seq_len, edge, seq_len), edge]
    padding = packed_length - len(tokens)
    if padding:
        tokens = torch.cat((tokens, tokens.new_zeros(padding)))
        labels = torch.cat((labels, labels.new_full((padding,), IGNORED)))
        borders = [*borders, packed_length]
    cu_seqlens = torch.tensor(borders, dtype=torch.int64, device=tokens.device)
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    indexes = torch.arange(packed_length, device=tokens.device) - starts
    return Rows(tokens=tokens[None], labels=labels[None], positions=indexes[None], cu_seqlens=cu_seqlens)


def build_unpack(sentences: Sequence[Tensor], *, micro_bsz: int, seq_len: int) -> Rows:
    """The first micro_bsz rows of these sentences, a sentence a row; positions count through the padding.

    A sentence above seq_len goes on in the next row, its labels running through the cut. Empty sentences leave no
    trace.
    """
    pieces = [
        piece
        for sentence in sentences
        if len(sentence)
        for piece in zip(sentence.split(seq_len), _next_tokens(sentence).split(seq_len), strict=True)
    ]
    tokens = torch.zeros((micro_bsz, seq_len), dtype=torch.int64, device="cpu")
    labels = torch.full_like(tokens, IGNORED)
    for row, (piece, after) in enumerate(pieces[:micro_bsz]):
        tokens[row, : len(piece)] = piece
        labels[row, : len(piece)] = after
    positions = torch.arange(seq_len, device="cpu").repeat(micro_bsz, 1)
    return Rows(tokens=tokens, labels=labels, positions=positions, cu_seqlens=None)


def without_prompts(tokens: Tensor, labels: Tensor, padding: int = IGNORED) -> tuple[Tensor, Tensor]:
    """Tokens and labels as the model reads and learns them: prompts by their absolute values, and never learned.

    A label that is not learned becomes `padding`.
    """
    return tokens.abs(), torch.where(labels >= 0, labels, padding)


def _next_tokens(tokens: Tensor) -> Tensor:
    """Every token's successor, -100 at the end."""
    return torch.cat((tokens[1:], tokens.new_full((1,), IGNORED)))
