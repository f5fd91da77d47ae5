"""Layout: cutting and putting together are inverse, pieces partition the full tensor, impossible cuts are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.layout import Box, Placement, gather, local_shape, pieces, rows, shard
from parallel.mesh import axis_size
from parallel.registry import MODES
from reference.case import Case
from reference.model.parameters import full, shapes
from tests.parallel.ranks import MEGATRON


@st.composite
def _placements(draw: st.DrawFn) -> tuple[Placement, int]:
    """A placement that can be cut, and the number of parts."""
    parts, unit, dim = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    blocks = tuple(parts * unit * n for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    padding = draw(st.integers(0, blocks[-1] - 1)) if draw(st.booleans()) else 0
    shape = [draw(st.integers(1, 3)) for _ in range(3)]
    shape[dim] = sum(blocks) - padding
    split = draw(st.booleans()) or padding > 0 or len(blocks) > 1
    place = Placement(shape=tuple(shape), axis="tp" if split else "", dim=dim, blocks=blocks, unit=unit)
    return place, parts


def _full(place: Placement) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(place.shape).numel(), dtype=torch.float64).view(place.shape)


@settings(max_examples=200, deadline=None)
@given(_placements())
def test_gather_is_the_inverse_of_shard(drawn: tuple[Placement, int]) -> None:
    place, parts = drawn
    full_ = _full(place)
    locals_ = [shard(full_, place, index=index, parts=parts) for index in range(parts)]
    assert {tuple(local.shape) for local in locals_} == {local_shape(place, parts=parts)}
    assert torch.equal(gather(locals_, place), full_)


@settings(max_examples=200, deadline=None)
@given(_placements())
def test_pieces_hold_every_element_once_and_no_padding(drawn: tuple[Placement, int]) -> None:
    place, parts = drawn
    full_, covered = _full(place), torch.zeros(place.shape)
    for index in range(parts if place.axis else 1):
        local = shard(full_, place, index=index, parts=parts)
        for piece in pieces(local, place, index=index, parts=parts):
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.local.shape, strict=True))
            assert piece.global_shape == place.shape
            assert torch.equal(full_[box], piece.local)
            covered[box] += 1
    assert torch.equal(covered, torch.ones(place.shape))


def test_a_fused_weight_gives_every_rank_its_part_of_both_blocks() -> None:
    place = Placement(shape=(12, 1), axis="tp", blocks=(6, 6))
    local = shard(torch.arange(12)[:, None], place, index=1, parts=3)
    assert local[:, 0].tolist() == [2, 3, 8, 9]
    assert [piece.offsets for piece in pieces(local, place, index=1, parts=3)] == [(2, 0), (8, 0)]


def test_padding_is_zero_and_a_rank_of_padding_alone_has_no_piece() -> None:
    place = Placement(shape=(5, 2), axis="tp", blocks=(8,))
    locals_ = [shard(torch.ones(5, 2), place, index=index, parts=4) for index in range(4)]
    assert locals_[2].tolist() == [[1, 1], [0, 0]]
    assert locals_[3].tolist() == [[0, 0], [0, 0]]
    assert pieces(locals_[3], place, index=3, parts=4) == ()


def test_a_cut_inside_a_kv_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks=\(12,\): each must be a multiple of 2 ranks x 4 .*legal: 16"):
        local_shape(Placement(shape=(12, 3), axis="tp", unit=4), parts=2)


def test_illegal_placements_and_tensors_are_named() -> None:
    with pytest.raises(ValueError, match="dim=2: must be a dim"):
        Placement(shape=(4, 4), axis="tp", dim=2)
    with pytest.raises(ValueError, match=r"blocks=\(2,\): must cover the 4 elements"):
        Placement(shape=(4, 4), axis="tp", blocks=(2,))
    with pytest.raises(ValueError, match=r"full.shape=\(4, 5\)"):
        shard(torch.ones(4, 5), Placement(shape=(4, 4), axis="tp"), index=0, parts=2)


def test_rows_move_boxes_down_a_taller_tensor() -> None:
    box = Box(local=torch.ones(2, 3), offsets=(1, 4), global_shape=(3, 7))
    (moved,) = rows([box], first=6, total=12)
    assert (moved.offsets, moved.global_shape) == ((7, 4), (12, 7))
    assert moved.local is box.local


@pytest.mark.parametrize("megatron", MEGATRON)
@pytest.mark.parametrize(
    "words",
    [
        "tp=3 heads=6 kv_heads=3 hidden=48 ffn=96 seq=12 fuse_qkv=false",
        "tp=4 kv_heads=4 vocab=300 tied=false qk_norm=true",
        "tp=2 family=internlm2 vocab=264 fuse_mlp=true",
    ],
)
def test_every_parameter_of_a_case_survives_the_round_trip(megatron: str, words: str) -> None:
    case = Case.parse(f"mode={megatron} {words}")
    places = MODES[megatron].placements(case)
    assert list(places) == list(shapes(case))
    split = 0
    for name, place in places.items():
        value = full(case, name)
        parts = axis_size(case, place.axis) if place.axis else 1
        locals_ = [shard(value, place, index=index, parts=parts) for index in range(parts)]
        assert torch.equal(gather(locals_, place), value), name
        split += parts > 1
    assert split > 0
