"""Which tokens of a row each context rank holds, in which order they lie there, and which of them may meet.

    order        rank r of c holds                                                    work of causal attention
    contiguous   chunk r of c                                                         grows with r
    zigzag       chunks r and 2c-1-r of 2c, in this order                             equal, on each pair of ranks too
    zigzag by document   the same two chunks of every packed document, end to end     equal in every document

Zigzag of the whole row cuts documents anywhere, and balances only a row that is one document. By document, every length
should be a multiple of 2c (Megatron pads documents to that). Chunks of a length that is no multiple differ by one
token, the first ones longer, and may be empty. Only `ring` takes slices of unequal length.

Labels are shifted before anything is sliced: the label of the last token of a chunk is a token of another rank.
Positions are sliced like tokens, so rotary embeddings and masks know where a token stands in its row.
Source: Megatron-Core `get_batch_on_this_cp_rank` and `get_thd_batch_on_this_cp_rank` (around.md 12.2, 14.2);
arXiv:2311.09431 (striped and zigzag orders).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """The slices of a row of S tokens.

    held    for every rank, int64 [tokens of its own]: their places in the row, in the order in which they lie there
    hidden  bool [B or 1, S, S], true where the token of one place must not see that of the other: borders of packed
            documents, padding. None: causal
    """

    held: tuple[Tensor, ...]
    hidden: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        """The places of all ranks, end to end: the order of what is gathered."""
        return torch.cat(self.held)

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Bool [queries, keys], with the mask's rows [B or 1, queries, keys]: may one place see the other?"""
        if self.hidden is None:
            return queries[:, None] >= keys[None, :]
        where = self.hidden.device
        return ~self.hidden[:, queries.to(where)[:, None], keys.to(where)]

    def joined(self, ranks: int) -> "Slices":
        """The slices of groups of `ranks` consecutive ranks, each group as one.

        Raises ValueError when `ranks` does not divide them.
        """
        if len(self.held) % ranks:
            raise ValueError(f"ranks={ranks}: must divide the {len(self.held)} ranks of the row; legal: ranks=1")
        groups = [self.held[first : first + ranks] for first in range(0, len(self.held), ranks)]
        return Slices(held=tuple(torch.cat(group) for group in groups), hidden=self.hidden)

    def require_equal(self, method: str) -> None:
        """Raise ValueError unless every rank holds as many tokens as the others, which this method needs."""
        lengths = [len(own) for own in self.held]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"held: the ranks hold {lengths} tokens, and {method} needs equal slices; "
                f"legal: a row of a multiple of {len(lengths)} tokens, or the method ring"
            )


def contiguous(length: int, ranks: int) -> tuple[Tensor, ...]:
    """The places of every rank: one chunk each."""
    return torch.arange(length).tensor_split(ranks)


def zigzag(length: int, ranks: int) -> tuple[Tensor, ...]:
    """The places of every rank: a chunk from the front and its mirror image from the back."""
    chunks = torch.arange(length).tensor_split(2 * ranks)
    return tuple(torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(ranks))


def zigzag_by_document(cu_seqlens: Tensor, ranks: int) -> tuple[Tensor, ...]:
    """The places of every rank: its two chunks of each document, one document after the other.

    `cu_seqlens` int64 [n + 1] holds the borders of the documents, from 0 to the row's length.
    """
    parts: list[list[Tensor]] = [[] for _ in range(ranks)]
    for first, last in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for mine, own in zip(parts, zigzag(last - first, ranks), strict=True):
            mine.append(first + own)
    return tuple(torch.cat(mine) for mine in parts)


def sliced(row: Tensor, own: Tensor, *, dim: int = 1) -> Tensor:
    """This rank's part of tokens, labels, loss mask or positions [B, S], or of a tensor with a row along `dim`."""
    return row.index_select(dim, own.to(row.device))
