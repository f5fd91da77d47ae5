"""Slices of a row: a partition, its inverse, the causal work of every rank, Megatron-Core's own slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.context.slices import Slices, contiguous, sliced, together, zigzag, zigzag_by_document
from tests.parallel.context.rows import borders, hidden, ordered
from tests.parallel.ranks import numbers


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(("contiguous", "zigzag", "zigzag by document")),
    ranks=st.integers(1, 6),
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=4),
    rows=st.integers(1, 3),
)
def test_slices_partition_the_row_and_together_is_the_inverse(
    order: str, ranks: int, lengths: list[int], rows: int
) -> None:
    """For every length, also one that leaves ranks without a token; bit for bit."""
    cu_seqlens = borders(*lengths)
    length = sum(lengths)
    held = ordered(order, length, ranks, cu_seqlens)
    assert len(held) == ranks
    assert torch.equal(torch.cat(held).sort().values, torch.arange(length))
    row = numbers(rows, length, 2)
    assert torch.equal(together([sliced(row, own) for own in held], held), row)


def test_the_places_by_hand() -> None:
    assert [own.tolist() for own in contiguous(8, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [own.tolist() for own in zigzag(8, 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    # Two documents of 4 and 8 tokens: a chunk has 1 and 2 tokens; every rank holds half of either.
    assert [own.tolist() for own in zigzag_by_document(torch.tensor([0, 4, 12]), 2)] == [
        [0, 3, 4, 5, 10, 11],
        [1, 2, 6, 7, 8, 9],
    ]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_work(ranks: int) -> None:
    """Zigzag: equal for every rank against every other; contiguous: from m(m+1)/2 up, m = 8 tokens a rank."""
    length = 8 * ranks
    even, uneven = (Slices(held=order(length, ranks)) for order in (zigzag, contiguous))
    assert {even.work(rank, owner) for rank in range(ranks) for owner in range(ranks) if rank != owner} == {32}
    assert {even.work(rank, rank) for rank in range(ranks)} == {36}
    shares = [sum(uneven.work(rank, owner) for owner in range(ranks)) for rank in range(ranks)]
    assert shares == [36 + 64 * rank for rank in range(ranks)]


def test_zigzag_by_document_balances_every_document() -> None:
    """Zigzag of the whole row does not: documents end anywhere in its chunks."""
    cu_seqlens, ranks = torch.tensor([0, 8, 20, 24]), 2
    documents = torch.arange(3).repeat_interleave(cu_seqlens.diff())

    def shares(held: tuple[torch.Tensor, ...]) -> set[int]:
        slices = Slices(held=held, hidden=hidden(24, cu_seqlens))
        return {sum(slices.work(rank, owner) for owner in range(ranks)) for rank in range(ranks)}

    assert len(shares(zigzag_by_document(cu_seqlens, ranks))) == 1
    assert len(shares(zigzag(24, ranks))) == 2
    for own in zigzag_by_document(cu_seqlens, ranks):  # the borders of a rank's tokens are those of the row over c
        assert documents[own].bincount().cumsum(0).tolist() == (cu_seqlens[1:] // ranks).tolist()


def test_joined_slices_are_those_of_the_groups() -> None:
    slices = Slices(held=zigzag(24, 6))
    assert torch.equal(slices.joined(2).held[1], torch.cat((slices.held[2], slices.held[3])))
    assert torch.equal(slices.joined(3).whole, slices.whole)
    with pytest.raises(ValueError, match="ranks=4: must divide the 6 ranks of the row; legal: ranks=1"):
        slices.joined(4)


class Group:
    """A process group of which only the size and this rank are known."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = (lambda: size), (lambda: rank)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [2, 3])
def test_zigzag_is_that_of_megatron(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core's slices of every tensor of a batch; its attention mask is sliced along the queries alone."""
    theirs = pytest.importorskip("megatron.core.utils", reason="needs the extra `peers`").get_batch_on_this_cp_rank
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    length = 4 * ranks
    tokens, mask = torch.arange(2 * length).view(2, length), numbers(2, 1, length, length)
    for rank, own in enumerate(zigzag(length, ranks)):
        batch = theirs({"tokens": tokens, "attention_mask": mask}, Group(ranks, rank))
        assert torch.equal(batch["tokens"], sliced(tokens, own))
        assert torch.equal(batch["attention_mask"], sliced(mask, own, dim=2))
