"""Layout: cutting and putting together are inverse, pieces partition the full tensor, impossible cuts are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.communication.layout import Box, Cut, Placement, gather, local_shape, meshgrid, pieces, rows, shard

SIZES = st.fixed_dictionaries({"tp": st.integers(1, 4), "dp": st.sampled_from((1, 3, 5))})
"""Two axes of unequal sizes, more often than not."""


@st.composite
def _cuts(draw: st.DrawFn, axis: str, ranks: int, shape: tuple[int, ...]) -> Cut:
    """A cut that a tensor of this shape can have: any order, any dim or all of it, blocks, padding, uneven shares."""
    dim = draw(st.none() | st.integers(0, len(shape) - 1))
    length, unit = torch.Size(shape).numel() if dim is None else shape[dim], draw(st.integers(1, 2))
    kind = draw(st.sampled_from(("blocks", "padded", "chunks", "zigzag", "held")))
    if kind == "held":
        ends = sorted(draw(st.lists(st.integers(0, length), min_size=ranks - 1, max_size=ranks - 1)))
        starts = [0, *ends]
        return Cut(axis=axis, dim=dim, held=tuple((range(a, b),) for a, b in zip(starts, [*ends, length], strict=True)))
    if kind == "blocks" and length % (2 * ranks * unit) == 0:
        return Cut(axis=axis, dim=dim, unit=unit, blocks=(length // 2, length // 2))
    if kind == "zigzag" and length % (2 * ranks) == 0:
        return Cut(axis=axis, dim=dim, order="zigzag")
    if kind == "padded":
        whole = ranks * unit
        return Cut(
            axis=axis, dim=dim, unit=unit, blocks=(-(-length // whole) * whole + draw(st.sampled_from((0, whole))),)
        )
    return Cut(axis=axis, dim=dim, order="chunks")


@st.composite
def _placements(draw: st.DrawFn) -> tuple[Placement, dict[str, int]]:
    """A placement with none, one or two cuts, and the sizes of its axes. The second fits every local tensor."""
    sizes = draw(SIZES)
    place = Placement(shape=tuple(draw(st.lists(st.sampled_from((1, 2, 3, 5, 8, 12)), min_size=1, max_size=3))))
    for axis in draw(st.permutations(list(sizes)))[: draw(st.integers(0, 2))]:
        shapes_ = {local_shape(place, at) for at in meshgrid(sizes)}
        # Later cuts see tensors that differ between ranks where an earlier one left uneven shares.
        cut = Cut(axis=axis, order="chunks", dim=draw(st.sampled_from((0, None))))
        if len(shapes_) == 1:
            cut = draw(_cuts(axis, sizes[axis], shapes_.pop()))
        place = Placement(shape=place.shape, cuts=(*place.cuts, cut))
    return place, sizes


def _full(place: Placement) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(place.shape).numel(), dtype=torch.float64).view(place.shape)


@settings(max_examples=300, deadline=None)
@given(_placements())
def test_gather_is_the_inverse_of_shard_and_pieces_hold_every_element_once(
    drawn: tuple[Placement, dict[str, int]],
) -> None:
    """Any number of cuts; padding is zero and in no piece; what no cut splits is held by every rank of that axis."""
    place, sizes = drawn
    full_, covered = _full(place), torch.zeros(place.shape)
    mesh = meshgrid(sizes)
    locals_ = [(at, shard(full_, place, at)) for at in mesh]
    copies = len(mesh) // torch.Size([sizes[axis] for axis in place.axes]).numel()
    for at, local in locals_:
        assert tuple(local.shape) == local_shape(place, at)
        found = pieces(local, place, at)
        for piece in found:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.local.shape, strict=True))
            assert piece.global_shape == place.shape and piece.local.numel()
            assert torch.equal(full_[box], piece.local)
            covered[box] += 1
        assert local.count_nonzero() == sum(piece.local.numel() for piece in found)
    assert torch.equal(covered, torch.full(place.shape, float(copies)))
    assert torch.equal(gather(locals_, place), full_)


def test_rows_over_tensor_parallel_rows_are_not_contiguous_in_mesh_order() -> None:
    """around.md 15.3: dim 0 is cut by tp first, then by dp, as FSDP2 over tensor parallelism does."""
    place = Placement(shape=(10, 2), cuts=(Cut(axis="tp"), Cut(axis="dp", order="chunks")))
    rows_ = {
        (tp, dp): [int(row) // 2 for row in shard(_full(place) - 1, place, {"tp": (tp, 2), "dp": (dp, 4)})[:, 0]]
        for tp in range(2)
        for dp in range(4)
    }
    assert [rows_[0, dp] for dp in range(4)] == [[0, 1], [2, 3], [4], []]  # 5 rows on 4 ranks: an empty shard
    assert [rows_[1, dp] for dp in range(4)] == [[5, 6], [7, 8], [9], []]


def test_a_range_of_a_flat_bucket_is_boxes_of_the_parameter() -> None:
    """ZeRO-1 over columns of tensor parallelism: elements 3 .. 10 of a local [4, 3], so an edge, rows, an edge."""
    cuts = (Cut(axis="tp", dim=1), Cut(axis="dp", dim=None, held=((range(3),), (range(3, 11),), (range(11, 12),))))
    place = Placement(shape=(4, 6), cuts=cuts)
    at = {"tp": (1, 2), "dp": (1, 3)}
    local = shard(_full(place) - 1, place, at)
    assert local.tolist() == [9, 10, 11, 15, 16, 17, 21, 22]
    assert [(piece.offsets, piece.local.tolist()) for piece in pieces(local, place, at)] == [
        ((1, 3), [[9, 10, 11], [15, 16, 17]]),
        ((3, 3), [[21, 22]]),
    ]


def test_a_cut_inside_a_kv_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks=\(12,\): each must be a multiple of 2 ranks x 4 .*legal: 16"):
        local_shape(Placement(shape=(12, 3), cuts=(Cut(axis="tp", unit=4),)), {"tp": (0, 2)})


def test_illegal_placements_and_tensors_are_named() -> None:
    with pytest.raises(ValueError, match="dim=2: must be a dim"):
        Placement(shape=(4, 4), cuts=(Cut(axis="tp", dim=2),))
    with pytest.raises(ValueError, match=r"blocks=\(2,\): must cover the 4 elements"):
        Placement(shape=(4, 4), cuts=(Cut(axis="tp", blocks=(2,)),))
    with pytest.raises(ValueError, match=r"full.shape=\(4, 5\)"):
        shard(torch.ones(4, 5), Placement(shape=(4, 4), cuts=(Cut(axis="tp"),)), {"tp": (0, 2)})
    with pytest.raises(ValueError, match="axis=tp: these coordinates have no such axis; legal: dp"):
        local_shape(Placement(shape=(4, 4), cuts=(Cut(axis="tp"),)), {"dp": (0, 2)})
    with pytest.raises(ValueError, match=r"order=spiral: .*legal: blocks\|chunks\|zigzag"):
        Cut(axis="tp", order="spiral")


def test_rows_move_boxes_down_a_taller_tensor() -> None:
    box = Box(local=torch.ones(2, 3), offsets=(1, 4), global_shape=(3, 7))
    (moved,) = rows([box], first=6, total=12)
    assert (moved.offsets, moved.global_shape) == ((7, 4), (12, 7))
    assert moved.local is box.local
