"""The two copies, the scales of quantised weights, and inverses: exact, or refused with the rule."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardproof.parallel.communication.layout import Cut, Placement
from shardproof.parallel.slicing.checkpoint import inverse
from shardproof.parallel.slicing.rows import Heads, RowRanges, consecutive, fused_rows
from shardproof.parallel.slicing.slices import plain, scales, strided_placement
from shardproof.reference.errors import CaseError
from tests.parallel.slicing.drawn_slices import check_round_trip, drawn, heads_and_ranks, parts_of


def test_a_copy_that_would_lose_or_merge_is_refused() -> None:
    with pytest.raises(CaseError, match=r"dst=\(4, 9\): is larger than src=\(4, 6\): slicing cuts and never merges"):
        plain((4, 6), (4, 9), ranks=2)
    with pytest.raises(CaseError, match=r"dst=\(4, 3\): times ranks=2 is not the 7 of dim 1: the rest would be lost"):
        plain((4, 7), (4, 3), ranks=2)
    with pytest.raises(CaseError, match=r"dst=\(2, 3\): must differ from src=\(4, 6\) in one dim alone"):
        plain((4, 6), (2, 3), ranks=2)
    with pytest.raises(CaseError, match=r"shape=\(2, 2, 2\): must be that of a weight \[2 dims\] or a bias \[1 dim\]"):
        plain((2, 2, 2), (2, 2, 1), ranks=2)
    with pytest.raises(CaseError, match="orientation=rows: is not a known word; legal: in-out|out-in"):
        plain((4, 6), (4, 3), ranks=2, orientation="rows")
    with pytest.raises(CaseError, match=r"parts=\(6, 6, 4\): must each be a multiple of ranks=4; legal: \(8, 8, 4\)"):
        strided_placement((4, 16), (4, 4), ranks=4, parts=(6, 6, 4))
    with pytest.raises(CaseError, match=r"parts=\(6, 6\): must sum to the 18 output features"):
        strided_placement((4, 18), (4, 9), ranks=2, parts=(6, 6))


@settings(max_examples=50, deadline=None)
@given(heads_and_ranks(), st.sampled_from((1, 2, 3)), st.integers(0, 2), st.booleans())
def test_dequantising_commutes_with_slicing(
    drawn_: tuple[Heads, int], column_blocks: int, rows: int, transposed: bool
) -> None:
    """A scale of the whole weight, one a head, or one a row; and blocks of columns, which every rank needs."""
    heads, ranks = drawn_
    held = fused_rows(heads, ranks, "blocks")
    count = (1, heads.query + 2 * heads.kv, heads.fused)[rows]
    shape, grid = (heads.fused, 6), (count, column_blocks)
    shape, grid = (shape[::-1], grid[::-1]) if transposed else (shape, grid)
    place = Placement(shape=shape, cuts=(Cut(axis="tp", dim=int(transposed), held=held),))
    weight, scale = drawn(shape, torch.int8, 3), torch.rand(grid, dtype=torch.float64)

    def dequantised(weight: Tensor, scale: Tensor) -> Tensor:
        for dim, size in enumerate(weight.shape):
            blocks = scale.shape[dim]
            scale = scale.repeat_interleave(size // blocks if blocks else 1, dim)
        return weight.to(torch.float64) * scale

    lies = scales(place, grid)
    check_round_trip(scale, lies, ranks)
    whole = ((weight, place), (scale, lies), (dequantised(weight, scale), place))
    for own, own_scale, right in zip(*(parts_of(tensor, at, ranks) for tensor, at in whole), strict=True):
        assert torch.equal(dequantised(own, own_scale), right)
        assert not rows or ranks == 1 or own_scale.shape != grid, "whole on every rank, scales are of other rows"


def test_a_cut_inside_a_block_of_scales_is_refused() -> None:
    place = plain((6, 4), (3, 4), ranks=2, orientation="out-in")
    with pytest.raises(CaseError, match=r"grid=\(2, 3\): must divide the weight \(6, 4\) into equal blocks"):
        scales(place, (2, 3))
    with pytest.raises(CaseError, match=r"has blocks of 2 in dim 0, and a cut at 0..3 falls inside one"):
        scales(place, (3, 1))


def test_an_inverse_of_parts_that_disagree_or_leave_a_gap_is_refused() -> None:
    copies: RowRanges = ((range(0, 2), range(4, 5)), (range(2, 5),))
    place = Placement(shape=(5,), cuts=(Cut(axis="tp", held=copies),))
    good = [torch.tensor([0, 1, 4]), torch.tensor([2, 3, 4])]
    assert inverse(good, place).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CaseError, match="differs from another rank's copy"):
        inverse([good[0], torch.tensor([2, 3, 9])], place)
    gap = Placement(shape=(5,), cuts=(Cut(axis="tp", held=consecutive([2, 2])),))
    with pytest.raises(CaseError, match="1 elements: lie on no rank"):
        inverse([torch.tensor([0, 1]), torch.tensor([2, 3])], gap)
    whole = Placement(shape=(2,))
    with pytest.raises(CaseError, match="differs from another rank's copy"):
        inverse([torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])], whole)
