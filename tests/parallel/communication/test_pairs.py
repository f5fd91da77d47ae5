"""The law of conjugate pairs: logical tensors are kept forward, gradients backward. Cutting and joining are inverse."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardproof.harness.engines.engine import Engine
from shardproof.parallel.communication import pairs
from shardproof.parallel.communication.layout import (
    Axis,
    Box,
    Cut,
    Placement,
    gather,
    local_shape,
    meshgrid,
    pieces,
    rows,
    shard,
)
from shardproof.suites.session.prover import Prover

Layout = str | int
Pair = Callable[[Tensor, Axis], Tensor]
RANKS = 3
_WEIGHTS = (0.7, -0.4, 0.7)
"""Unequal terms, of both signs, whose sum is 1."""

_WIDTHS = [4, 2, 3]
_HELD = ((range(0, 1), range(1, 4)), (range(4, 6),), (range(6, 9),))

_gathered_for_all = partial(pairs.gather_from_sequence, dim=1, tensor_parallel_output_grad=False)
PAIRS: dict[str, tuple[Pair, Layout, Layout, Layout, Layout]] = {
    "copy_to": (pairs.copy_to, "whole", "whole", "partial", "whole"),
    "reduce_from": (pairs.reduce_from, "partial", "whole", "whole", "whole"),
    "scatter_to": (pairs.scatter_to, "whole", 2, 2, "whole"),
    "gather_from": (pairs.gather_from, 2, "whole", "whole", 2),
    "scatter_to_sequence": (lambda x, a: pairs.scatter_to_sequence(x, a, dim=1), "whole", 1, 1, "whole"),
    "gather_from_sequence": (lambda x, a: pairs.gather_from_sequence(x, a, dim=1), 1, "whole", "partial", 1),
    "gather_from_sequence, nothing parallel behind": (_gathered_for_all, 1, "whole", "whole", 1),
    "reduce_scatter_to_sequence": (partial(pairs.reduce_scatter_to_sequence, dim=0), "partial", 0, 0, "whole"),
    "own_part": (lambda x, a: pairs.own_part(x, a, _HELD[a.rank]), "whole", "uneven", "uneven", "whole"),
    "gather_parts": (lambda x, a: pairs.gather_parts(x, a, _WIDTHS), "uneven", "whole", "whole", "uneven"),
    "all_to_all": (lambda x, a: pairs.all_to_all(x, a, split_dim=2, gather_dim=1), 1, 2, 2, 1),
}
"""Name -> (pair, layouts of its input, its output, the output's gradient, the input's)."""


def _kept(name: str, engine: Engine, strided: bool) -> bool:
    """Whether a pair keeps the law; `strided` hands it non-contiguous tensors."""
    generator = torch.Generator().manual_seed(7)
    x, gradient = (torch.randn(3, 6, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    pair, into, out, gradient_in, gradient_out = PAIRS[name]

    def program(rank: int) -> tuple[Tensor, Tensor]:
        group = dist.new_group(list(range(RANKS)), group_desc="tp")
        axis = Axis(name="tp", ranks=tuple(range(RANKS)), rank=rank, group=group)
        mine, upstream = _laid(x, into, axis), _laid(gradient, gradient_in, axis)
        if strided:
            mine, upstream = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (mine, upstream))
        mine.requires_grad_()
        y = pair(mine, axis)
        (y * upstream).sum().backward()
        assert mine.grad is not None
        return y.detach(), mine.grad

    outputs, gradients = zip(*engine.run(program, world_size=RANKS), strict=True)
    return _close(_read(outputs, out), x) and _close(_read(gradients, gradient_out), gradient)


def _laid(full: Tensor, layout: Layout, axis: Axis) -> Tensor:
    """A rank's tensor of a logical one, made without the code under test."""
    if layout == "whole":
        return full.clone()
    if layout == "partial":
        return full * _WEIGHTS[axis.rank]
    if layout == "uneven":
        return full[..., sum(_WIDTHS[: axis.rank]) :][..., : _WIDTHS[axis.rank]].clone()
    assert isinstance(layout, int)
    return full.chunk(axis.size, layout)[axis.rank].clone()


def _read(locals_: Sequence[Tensor], layout: Layout) -> Tensor | None:
    """The logical tensor of the ranks' own; None when ranks disagree on one that all should hold."""
    if layout == "whole":
        return locals_[0] if all(torch.equal(local, locals_[0]) for local in locals_) else None
    if layout == "partial":
        return torch.stack([*locals_]).sum(0)
    if layout == "uneven":
        return torch.cat([*locals_], 2)
    assert isinstance(layout, int)
    return torch.cat([*locals_], layout)


def _close(value: Tensor | None, truth: Tensor) -> bool:
    return value is not None and value.shape == truth.shape and torch.allclose(value, truth, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("strided", [False, True])
def test_every_pair_keeps_its_law(prover: Prover, strided: bool) -> None:
    assert [name for name in PAIRS if not _kept(name, prover.engine, strided)] == []


def test_a_pair_on_one_rank_is_nothing() -> None:
    x = torch.ones(3, 6, 9)
    axis = Axis(name="tp", ranks=(0,), rank=0, group=None)
    assert [name for name, (pair, *_) in PAIRS.items() if pair(x, axis) is not x] == []


def test_the_moved_tensor_is_not_the_input_that_autograd_knows(prover: Prover) -> None:
    """An identity forward that returned its very input would hide the backward collective from in-place users."""

    def program(rank: int) -> Tensor:
        group = dist.new_group([0, 1], group_desc="tp")
        x = torch.ones(3, requires_grad=True)
        y = pairs.copy_to(x, Axis(name="tp", ranks=(0, 1), rank=rank, group=group))
        (y * (rank + 1)).sum().backward()
        assert x.grad is not None
        return x.grad

    for gradient in prover.engine.run(program, world_size=2):
        assert torch.equal(gradient, torch.full((3,), 3.0))


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


@settings(max_examples=100, deadline=None)
@given(_placements())
def test_gather_is_inverse_of_shard_and_pieces_hold_every_element_once(drawn: tuple[Placement, dict[str, int]]) -> None:
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


def test_illegal_placements_and_tensors_are_named() -> None:
    with pytest.raises(ValueError, match="dim=2: must be a dim"):
        Placement(shape=(4, 4), cuts=(Cut(axis="tp", dim=2),))
    with pytest.raises(ValueError, match=r"blocks=\(2,\): must cover the 4 elements"):
        Placement(shape=(4, 4), cuts=(Cut(axis="tp", blocks=(2,)),))
    with pytest.raises(ValueError, match=r"full.shape=\(4, 5\)"):
        shard(torch.ones(4, 5), Placement(shape=(4, 4), cuts=(Cut(axis="tp"),)), {"tp": (0, 2)})
    with pytest.raises(ValueError, match="axis=tp: these coordinates have no such axis; legal: dp"):
        local_shape(Placement(shape=(4, 4), cuts=(Cut(axis="tp"),)), {"dp": (0, 2)})
    with pytest.raises(ValueError, match=r"blocks=\(12,\): each must be a multiple of 2 ranks x 4 .*legal: 16"):
        local_shape(Placement(shape=(12, 3), cuts=(Cut(axis="tp", unit=4),)), {"tp": (0, 2)})
    with pytest.raises(ValueError, match=r"order=spiral: .*legal: blocks\|chunks\|zigzag"):
        Cut(axis="tp", order="spiral")


def test_rows_move_boxes_down_a_taller_tensor() -> None:
    box = Box(local=torch.ones(2, 3), offsets=(1, 4), global_shape=(3, 7))
    (moved,) = rows([box], first=6, total=12)
    assert (moved.offsets, moved.global_shape) == ((7, 4), (12, 7))
    assert moved.local is box.local
