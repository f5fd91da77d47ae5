"""Tests of context/blocks and context/scheme. Attention on slices is the dense model's, by every method; slices of
a row: a partition, its inverse, its work.
"""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardproof.parallel.communication.collectives import Pending
from shardproof.parallel.context import scheme
from shardproof.parallel.context.blocks import (
    Partial,
    Slices,
    attend,
    contiguous,
    merge_partials,
    over_all_keys,
    slice_row,
    zigzag,
)
from tests.parallel.context.rows import METHODS, borders, dense, full_row, hidden, on_axis, ordered, together, wrong
from tests.parallel.ranks import group, numbers


@pytest.mark.parametrize(
    ("order", "length", "ranks"),
    [("zigzag", 7, 2), ("contiguous", 11, 3), ("zigzag", 5, 4), ("contiguous", 2, 3), ("zigzag", 2, 3)],
)
def test_a_ring_takes_slices_of_any_length(order: str, length: int, ranks: int) -> None:
    """Uneven ones, and with fewer tokens than ranks empty ones: nothing is sent of those."""
    full = full_row(2, length, 4, 2, seed=length)
    slices = Slices(held=ordered(order, length, ranks))
    assert len({len(own) for own in slices.held}) > 1
    for method in ("ring", "ring awaited"):
        assert wrong(on_axis(METHODS[method], full, slices), dense(full)) == []
    for method in ("gathered", "exchanged"):
        with pytest.raises(Exception, match=r"hold \[.*\] tokens, and .* needs equal slices; legal: "):
            on_axis(METHODS[method], full, slices)


@pytest.mark.parametrize("method", ["ring", "gathered", "exchanged"])
def test_a_rank_of_padding_is_zero(method: str) -> None:
    """Contiguous slices, the last of 3 ranks all padding: it sees nothing, is not seen, and no number is lost."""
    length, padding = 12, 5
    slices = Slices(held=contiguous(length, 3), hidden=hidden(length, borders(4, 3, padding), padding))
    full = full_row(2, length, 6, 3)
    assert wrong(on_axis(METHODS[method], full, slices), dense(full, borders(4, 3), padding)) == []


def test_the_order_of_merging_does_not_matter() -> None:
    """Five blocks with large scores, one of them empty and one all hidden: every order gives attention over all."""
    q, k, v = numbers(2, 3, 4, 3, seed=1) * 30, numbers(2, 9, 2, 3, seed=2), numbers(2, 9, 2, 3, seed=3)
    masked = torch.tensor([False, True, False, False, False, True, True, False, True])
    visible = ~masked.expand(3, -1)
    parts = [
        attend(q, k[:, own], v[:, own], visible[:, own])
        for own in (slice(0, 2), slice(2, 2), slice(2, 5), slice(5, 7), slice(7, 9))
    ]
    expected = over_all_keys(q, k, v, visible)
    for order in itertools.islice(itertools.permutations(range(5)), 0, None, 7):
        whole: Partial = parts[order[0]]
        for index in order[1:]:
            whole = merge_partials(whole, parts[index])
        assert (whole[0].flatten(2, 3) - expected).abs().max() < 1e-13
        assert (whole[1].isfinite()).all()


def test_in_bfloat16_the_error_does_not_grow_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are merged, and gradients of blocks travel, in the dtype of statistics: rounded, the error would grow."""
    full = [x.bfloat16() for x in full_row(2, 24, 4, 2)]
    expected = dense([x.double() for x in full])

    def errors(ranks: int) -> list[float]:
        found = on_axis(METHODS["ring"], full, Slices(held=zigzag(24, ranks)))
        assert {x.dtype for x in found} == {torch.bfloat16}
        return [float((one.double() - other).norm()) for one, other in zip(found, expected, strict=True)]

    def grown(ranks: int) -> list[bool]:
        return [far > 1.05 * alone for far, alone in zip(errors(ranks), errors(1), strict=True)]

    assert grown(4) == [False] * 4
    hop = scheme._hop

    def rounded(block: Tensor, *rest: Any, overlap: bool) -> Pending:
        return hop(block.bfloat16().to(block.dtype), *rest, overlap=overlap)

    monkeypatch.setattr(scheme, "_hop", rounded)
    assert any(grown(4))


@settings(max_examples=30, deadline=None)
@given(
    order=st.sampled_from(("contiguous", "zigzag")),
    ranks=st.integers(1, 6),
    length=st.integers(1, 68),
    rows=st.integers(1, 3),
)
def test_slices_partition_row_and_together_is_inverse(order: str, ranks: int, length: int, rows: int) -> None:
    """This holds bit for bit for every length, also one that leaves ranks without a token."""
    held = ordered(order, length, ranks)
    assert len(held) == ranks
    assert torch.equal(torch.cat(held).sort().values, torch.arange(length))
    row = numbers(rows, length, 2)
    assert torch.equal(together([slice_row(row, own) for own in held], held), row)


def test_the_places_by_hand() -> None:
    assert [own.tolist() for own in contiguous(8, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [own.tolist() for own in zigzag(8, 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_joined_slices_are_those_of_the_groups() -> None:
    slices = Slices(held=zigzag(24, 6))
    assert torch.equal(slices.merge_ranks(2).held[1], torch.cat((slices.held[2], slices.held[3])))
    assert torch.equal(slices.merge_ranks(3).gather_order, slices.gather_order)
    with pytest.raises(ValueError, match="ranks=4: must divide the 6 ranks of the row; legal: ranks=1"):
        slices.merge_ranks(4)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_zigzag_is_that_of_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core's slices of every tensor of a batch; its attention mask is sliced along the queries alone."""
    theirs = pytest.importorskip("megatron.core.utils", reason="needs the extra `peers`").get_batch_on_this_cp_rank
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    length, ranks = 12, 3
    tokens, mask = torch.arange(2 * length).view(2, length), numbers(2, 1, length, length)
    for rank, own in enumerate(zigzag(length, ranks)):
        batch = theirs({"tokens": tokens, "attention_mask": mask}, group(ranks, rank))
        assert torch.equal(batch["tokens"], slice_row(tokens, own))
        assert torch.equal(batch["attention_mask"], slice_row(mask, own, dim=2))
