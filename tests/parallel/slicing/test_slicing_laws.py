"""Tests of slices and rows: laws of generated shapes, pieces, inverses; or refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.parallel.communication.layout import Cut, Placement
from shardproof.parallel.slicing.checkpoint import inverse
from shardproof.parallel.slicing.rows import (
    ORDERS,
    Heads,
    RowRanges,
    consecutive,
    count_holders,
    fused_rows,
    query_rows,
    shard_sizes,
    widths,
)
from shardproof.parallel.slicing.slices import equal_pieces
from shardproof.reference.errors import CaseError
from tests.parallel.slicing.laws import (
    DTYPES,
    broken,
    check_round_trip,
    drawn,
    few_heads_and_ranks,
    heads_and_ranks,
    of_heads,
)


@settings(max_examples=50, deadline=None)
@given(heads_and_ranks(), st.sampled_from(sorted(ORDERS)), st.booleans(), st.booleans(), st.sampled_from(DTYPES))
def test_a_fused_weight_is_cut_exactly(
    drawn_: tuple[Heads, int], order: str, transposed: bool, bias: bool, dtype: torch.dtype
) -> None:
    """inverse(slice(w)) == w bit for bit; every row once; a rank's part is a weight of its own heads."""
    heads, ranks = drawn_
    if order == "codegen":
        heads = Heads(query=4 * ranks * heads.group, kv=4 * ranks * heads.group, size=heads.size)
    held = fused_rows(heads, ranks, order)
    assert broken(held, heads.fused, heads=heads, order=order, context=query_rows(heads, ranks)) == []
    assert set(count_holders(held, heads.fused)) == {1}
    assert sum(widths(held)) == heads.fused
    shape = (heads.fused,) if bias else (3, heads.fused) if transposed else (heads.fused, 3)
    place = Placement(shape=shape, cuts=(Cut(axis="tp", dim=int(transposed and not bias), held=held),))
    whole = drawn(shape, dtype, heads.fused)
    check_round_trip(whole, place, ranks)


@settings(max_examples=50, deadline=None)
@given(few_heads_and_ranks(), st.sampled_from(("blocks", "groups")))
def test_fewer_kv_heads_than_ranks_are_a_choice(drawn_: tuple[Heads, int], order: str) -> None:
    heads, ranks = drawn_
    with pytest.raises(CaseError, match=f"kv_heads={heads.kv}: leaves a rank of tp={ranks} without a head; legal: tp="):
        fused_rows(heads, ranks, order)
    empty = fused_rows(heads, ranks, order, spare="empty")
    assert widths(empty)[heads.kv :] == (0,) * (ranks - heads.kv)
    context = query_rows(heads, ranks, spare="empty")
    assert broken(empty, heads.fused, heads=heads, order=order, context=context) == []
    if ranks % heads.kv == 0 and heads.group % (ranks // heads.kv) == 0:
        copies = fused_rows(heads, ranks, order, spare="replicate")
        extra = 2 * (ranks - heads.kv) * heads.size
        context = query_rows(heads, ranks, spare="replicate")
        assert broken(copies, heads.fused, heads=heads, order=order, context=context, copied=extra) == []
        assert broken(copies, heads.fused, heads=heads, order=order, context=context)[0].startswith(
            f"{extra} elements are held more"
        )
        assert len(set(widths(copies))) == 1
        place = Placement(shape=(heads.fused, 2), cuts=(Cut(axis="tp", held=copies),))
        whole = drawn((heads.fused, 2), torch.float32, 7)
        check_round_trip(whole, place, ranks)
    else:
        with pytest.raises(CaseError, match="cannot be copied"):
            fused_rows(heads, ranks, order, spare="replicate")


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({"total": 10, "ranks": 4}, (3, 3, 2, 2)),
        ({"total": 64, "ranks": 3, "kv_heads": 8}, (24, 24, 16)),
        ({"total": 64, "ranks": 3, "kv_heads": 8, "name": "model.lm_head"}, (22, 21, 21)),
        ({"total": 96, "ranks": 5, "kv_heads": 6, "grain": 64}, (32, 16, 16, 16, 16)),
    ],
)
def test_sizes_worked_out_by_hand(asked: dict[str, object], sizes: tuple[int, ...]) -> None:
    """modes.md 8.2, experts.md 27.3; the head is known by the last part of its name, unlike in DeepSpeed."""
    assert shard_sizes(**asked) == sizes  # type: ignore[arg-type]


def rows(*ranks: str) -> RowRanges:
    """Rows that ranks hold, from "0-2 6-8": first and last rows."""
    ends = [[tuple(map(int, part.split("-"))) for part in words.split()] for words in ranks]
    return tuple(tuple(range(first, last + 1) for first, last in own) for own in ends)


@pytest.mark.parametrize(
    ("heads", "held", "order", "law"),
    [
        ((8, 2, 1), rows("0-1 4-5 8-9", "2-3 6-7 10-11"), "blocks", "heads, which share nothing evenly"),
        (
            (6, 6, 1),
            rows("0-2 6-8 12-14", "3-5 9-11 15-17"),
            "groups",
            "rank 0: its query heads are 0 2 4, its columns of the output projection those of 0 1 2",
        ),
        ((8, 1, 8), rows("0-15", "16-31", "32-47", "48-63"), "blocks", "16 of 80 elements are held by no rank"),
        ((2, 2, 2), rows("0-1 4-4 6-6 8-8 10-10", "2-3 5-5 7-7 9-9 11-11"), "blocks", "holds a part of a head"),
        ((3, 3, 4), rows("0-5", "6-11"), "", "falls inside a head of 4"),
        ((6, 6, 1), rows("0-1 3-4", "1-2 4-5"), "", "elements are held more than once"),
    ],
)
def test_a_wrong_slice_is_seen_by_the_law_that_is_meant_for_it(
    heads: tuple[int, int, int], held: RowRanges, order: str, law: str
) -> None:
    assert any(law in one for one in of_heads(held, Heads(query=heads[0], kv=heads[1], size=heads[2]), order))


def test_pieces_that_would_lose_a_remainder_are_refused() -> None:
    with pytest.raises(CaseError, match=r"parts=\(6, 6, 4\): must each be a multiple of ranks=4; legal: \(8, 8, 4\)"):
        equal_pieces((4, 16), 1, (6, 6, 4), 4)


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
