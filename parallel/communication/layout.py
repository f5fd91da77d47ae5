"""The mesh of a rank, and layouts: how one full tensor lies on the mesh; splitting and gathering are inverse.

    gather([(at, shard(full, place, at)) for at in meshgrid({"tp": 2, "dp": 3})], place) == full       for every place

A mesh has this rank's groups, one per axis, as explicit values, without any process-wide state. Ranks are global
ranks, numbered by the case's `order` (Megatron-Core `RankGenerator`).

A `Placement` is a shape and its cuts, one after the other. A second cut splits the local tensor that the first one
left, as FSDP2 over tensor parallelism does. Offsets and sizes count elements. A fused weight has several sub-parameters
end to end along the split dim (`blocks`: w13 = w1, then w3), and every block is split by itself. Only local tensors
have padding: it is zero, it follows the last real element, and no piece contains any of it. Sources: modes.md 8.2
(sub-parameters, granularity, exact inverse), around.md 15 (rows, flat buckets).
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.reference.case import Case

_TALKING = ("tp", "dp")
"""Axes of every mesh that get a group even with one rank, since their calls are issued all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """This rank's group along one axis: `rank` is its place in `ranks`, the group's global ranks in order."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    group: Any

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All axes as one global rank sees them."""

    rank: int
    axes: Mapping[str, Axis]

    @classmethod
    def of(cls, case: Case) -> "Mesh":
        """Make the groups of every axis; every rank must call this, with the same case.

        Raises ValueError unless the running world has the case's size.
        """
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if world_size != case.world_size:
            raise ValueError(
                f"world_size={world_size}: the case needs {'*'.join(case.mesh)}={case.world_size} ranks; "
                f"legal: {case.world_size} ranks"
            )
        axes: dict[str, Axis] = {}
        for name, groups in case.axes.items():
            # new_group is collective over the world: every rank must make every group, its own or not, in one order.
            # Axes of one rank get no group unless in _TALKING: a group for every rank of a large world would be slow.
            talks = name not in case.mesh or name in _TALKING or len(groups[0]) > 1
            made = [(ranks, dist.new_group(list(ranks), group_desc=name) if talks else None) for ranks in groups]
            own = [(ranks, group) for ranks, group in made if rank in ranks]
            if not own:
                continue  # the stages between the first and the last are in no group of `embedding`
            ranks, group = own[0]
            axes[name] = Axis(name=name, ranks=ranks, rank=ranks.index(rank), group=group)
        return cls(rank=rank, axes=axes)

    @cached_property
    def coordinates(self) -> dict[str, tuple[int, int]]:
        """Axis -> (this rank's place on it, ranks on it)."""
        return {name: (axis.rank, axis.size) for name, axis in self.axes.items()}

    def axis(self, name: str) -> Axis:
        """The axis of this name; raises ValueError for one that the case's mesh does not have."""
        if name not in self.axes:
            raise ValueError(f"axis={name}: is not an axis of this mesh; legal: {' '.join(self.axes)}")
        return self.axes[name]


def axis_size(case: Case, name: str) -> int:
    """Ranks along one axis of a case's mesh; needs no running world."""
    return case.axis_sizes[name]


def axis_rank(case: Case, name: str, rank: int) -> int:
    """The place of a global rank in its group along one axis; needs no running world."""
    return case.axis_rank(name, rank)


@lru_cache(maxsize=2**14)
def coordinates(case: Case, rank: int) -> Mapping[str, tuple[int, int]]:
    """Axis -> (place of a global rank on it, ranks on it); needs no running world."""
    return {name: (axis_rank(case, name, rank), axis_size(case, name)) for name in case.axis_sizes}


Coordinates = Mapping[str, tuple[int, int]]
"""Mesh axis -> (place of a rank on it, number of ranks on it)."""
_ORDERS = ("blocks", "chunks", "zigzag")


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box of a full tensor: `full[offsets : offsets + local.shape] == local`."""

    local: Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A split of a tensor over a mesh axis, along `dim`.

    With `dim` None all elements are split end to end, and the local tensor has one dim.

    order   blocks   each of `blocks` in equal shares at multiples of `unit` (rows of one kv group). `blocks` are the
                     lengths of the sub-parameters (empty: the whole dim is one block). If their sum exceeds the dim,
                     the excess is padding
            chunks   ceil(length / ranks) elements each, the last ranks fewer or none (`torch.chunk`, FSDP2)
            zigzag   2 * ranks equal chunks; rank i holds chunks i and 2 * ranks - 1 - i (causal context ranks)
    held    replaces the order: for every rank of the axis, the ranges of elements that it holds, in their order on the
            rank (shares may differ or be empty, and an element may lie on several ranks)

    Raises ValueError for an unknown order.
    """

    axis: str
    dim: int | None = 0
    unit: int = 1
    blocks: tuple[int, ...] = ()
    held: tuple[tuple[range, ...], ...] = ()
    order: str = "blocks"

    def __post_init__(self) -> None:
        if self.order not in _ORDERS:
            raise ValueError(f"order={self.order}: is no order of a cut; legal: {'|'.join(_ORDERS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A full tensor of `shape`, and its cuts in the order in which they are made; without cuts it is replicated.

    Raises ValueError for a first cut whose `dim`, `blocks` or `held` does not fit the shape. Later cuts are checked
    when they are made, because the shapes that they split depend on the rank.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()

    def __post_init__(self) -> None:
        for cut in self.cuts[:1]:
            _check(cut, self.shape)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it is split over."""
        return tuple(cut.axis for cut in self.cuts)


def meshgrid(sizes: Mapping[str, int]) -> list[Coordinates]:
    """The coordinates of every rank of a mesh of these sizes; the last axis changes fastest."""
    places = itertools.product(*(range(size) for size in sizes.values()))
    return [dict(zip(sizes, zip(each, sizes.values(), strict=True), strict=True)) for each in places]


def local_shape(place: Placement, at: Coordinates) -> tuple[int, ...]:
    """Shape of the local tensor of the rank at these coordinates, padding included.

    Raises ValueError when the cuts do not divide the tensor.
    """
    return _shapes(place, at)[-1]


def shard(full: Tensor, place: Placement, at: Coordinates) -> Tensor:
    """The local tensor of the rank at these coordinates: a copy, with zeros as padding.

    Raises ValueError when `full` does not have the placement's shape, or the cuts do not divide it.
    """
    if tuple(full.shape) != place.shape:
        raise ValueError(f"full.shape={tuple(full.shape)}: must be the placement's shape; legal: {place.shape}")
    local = full
    for cut in place.cuts:
        local = _cut(local, cut, *_place(cut, at))
    return local if place.cuts else full.clone()


def pieces(local: Tensor, place: Placement, at: Coordinates) -> tuple[Box, ...]:
    """The boxes of the full tensor that a local tensor holds; none for a rank that holds nothing but padding."""
    found = [(local, (0,) * local.dim())]
    for cut, shape in reversed([*zip(place.cuts, _shapes(place, at), strict=False)]):
        found = [outer for one, offsets in found for outer in _before(one, offsets, cut, shape, at)]
    return tuple(Box(local=one, offsets=offsets, global_shape=place.shape) for one, offsets in found)


def whole_box(full: Tensor) -> Box:
    """A whole tensor as one box."""
    return Box(local=full, offsets=(0,) * full.dim(), global_shape=tuple(full.shape))


def rows(boxes: Sequence[Box], *, first: int, total: int) -> tuple[Box, ...]:
    """Boxes of a tensor as boxes of a taller tensor: its dim 0 has `total` rows, and the boxes begin at row `first`."""
    return tuple(
        Box(
            local=box.local,
            offsets=(first + box.offsets[0], *box.offsets[1:]),
            global_shape=(total, *box.global_shape[1:]),
        )
        for box in boxes
    )


def gather(locals_: Iterable[tuple[Coordinates, Tensor]], place: Placement) -> Tensor:
    """The full tensor from the local tensors of all ranks of its axes: the inverse of `shard`."""
    pairs = list(locals_)
    if not place.cuts:
        return pairs[0][1].clone()
    full = pairs[0][1].new_empty(place.shape)
    for at, local in pairs:
        for piece in pieces(local, place, at):
            box = [slice(start, start + size) for start, size in zip(piece.offsets, piece.local.shape, strict=True)]
            full[tuple(box)] = piece.local
    return full


def _place(cut: Cut, at: Coordinates) -> tuple[int, int]:
    if cut.axis not in at:
        raise ValueError(f"axis={cut.axis}: these coordinates have no such axis; legal: {' '.join(at)}")
    return at[cut.axis]


def _shapes(place: Placement, at: Coordinates) -> list[tuple[int, ...]]:
    """The full shape, then the local shape after each cut."""
    found = [place.shape]
    for cut in place.cuts:
        shape = found[-1]
        width = _width(cut, shape, *_place(cut, at))
        found.append((width,) if cut.dim is None else (*shape[: cut.dim], width, *shape[cut.dim + 1 :]))
    return found


def _cut(full: Tensor, cut: Cut, index: int, parts: int) -> Tensor:
    """The part of a tensor that a cut leaves on a rank."""
    shape = tuple(full.shape)
    if cut.dim is None:
        full = full.flatten()
    dim = cut.dim or 0
    runs = [full.narrow(dim, start, length) for start, length in _runs(cut, shape, index, parts)]
    missing = _width(cut, shape, index, parts) - sum(run.shape[dim] for run in runs)
    padding = full.new_zeros((*full.shape[:dim], missing, *full.shape[dim + 1 :]))
    return torch.cat([*runs, padding], dim)


def _before(
    box: Tensor, offsets: tuple[int, ...], cut: Cut, shape: tuple[int, ...], at: Coordinates
) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """A box of a cut's result, as boxes of the tensor (of `shape`) that was cut."""
    dim, taken = cut.dim or 0, 0
    for start, length in _runs(cut, shape, *_place(cut, at)):
        first = max(offsets[dim], taken)
        last = min(offsets[dim] + box.shape[dim], taken + length)
        if first < last:
            part, found = box.narrow(dim, first - offsets[dim], last - first), start + first - taken
            if cut.dim is None:
                yield from _unflatten(part, found, shape)
            else:
                yield part, (*offsets[:dim], found, *offsets[dim + 1 :])
        taken += length


def _unflatten(flat: Tensor, start: int, shape: tuple[int, ...]) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """`flat`, the elements of a tensor of `shape` from number `start` on, as boxes, with all whole rows in one box."""
    if len(shape) < 2:
        yield flat.view(flat.shape if shape else ()), (start,) * len(shape)
        return
    row = math.prod(shape[1:])
    while flat.numel():
        index, inside = divmod(start, row)
        whole = 0 if inside else flat.numel() // row
        taken = whole * row or min(row - inside, flat.numel())
        if whole:
            yield flat[:taken].view(whole, *shape[1:]), (index, *(0,) * (len(shape) - 1))
        else:
            for part, offsets in _unflatten(flat[:taken], inside, shape[1:]):
                yield part[None], (index, *offsets)
        flat, start = flat[taken:], start + taken


def _check(cut: Cut, shape: tuple[int, ...]) -> None:
    """Raise ValueError for a dim or for blocks that a tensor of this shape does not have."""
    if cut.dim is not None and not 0 <= cut.dim < len(shape):
        raise ValueError(f"dim={cut.dim}: must be a dim of shape={shape}; legal: 0..{len(shape) - 1}")
    length, where = _length(cut, shape), "the flat tensor" if cut.dim is None else f"dim {cut.dim}"
    if cut.blocks and sum(cut.blocks) < length:
        raise ValueError(f"blocks={cut.blocks}: must cover the {length} elements of {where}; legal: blocks={(length,)}")
    for part in itertools.chain.from_iterable(cut.held):
        if part.step != 1 or not 0 <= part.start <= part.stop <= length:
            raise ValueError(f"held={part}: must be a range of {where} in steps of 1; legal: {range(length)}")


def _length(cut: Cut, shape: tuple[int, ...]) -> int:
    return math.prod(shape) if cut.dim is None else shape[cut.dim]


@functools.lru_cache(maxsize=4096)
def _width(cut: Cut, shape: tuple[int, ...], index: int, parts: int) -> int:
    """Number of elements along the cut that one rank holds, padding included."""
    if cut.held or cut.order != "blocks":
        return sum(length for _, length in _runs(cut, shape, index, parts))
    _check(cut, shape)
    return sum(_widths(cut, _length(cut, shape), parts))


def _widths(cut: Cut, length: int, parts: int) -> list[int]:
    """The share of a rank in every block."""
    blocks, whole = cut.blocks or (length,), parts * cut.unit
    for block in blocks:
        if block % whole:
            raise ValueError(
                f"blocks={blocks}: each must be a multiple of {parts} ranks x {cut.unit} elements; "
                f"legal: {-(-block // whole) * whole}"
            )
    return [block // parts for block in blocks]


@functools.lru_cache(maxsize=4096)
def _runs(cut: Cut, shape: tuple[int, ...], index: int, parts: int) -> tuple[tuple[int, int], ...]:
    """The (start, length) of this rank's elements along the cut, in their order on the rank, without padding."""
    _check(cut, shape)
    length = _length(cut, shape)
    if cut.held:
        if len(cut.held) != parts:
            raise ValueError(f"parts={parts}: held says what {len(cut.held)} ranks hold; legal: {len(cut.held)}")
        return tuple((part.start, len(part)) for part in cut.held[index])
    if cut.order == "chunks":
        share = -(-length // parts)
        first = min(index * share, length)
        return ((first, min(first + share, length) - first),)
    if cut.order == "zigzag":
        (share,) = _widths(Cut(axis=cut.axis, unit=cut.unit), length, 2 * parts)
        return (index * share, share), ((2 * parts - 1 - index) * share, share)
    blocks, runs = cut.blocks or (length,), []
    for start, width in zip(itertools.accumulate(blocks, initial=0), _widths(cut, length, parts), strict=False):
        first = min(start + index * width, length)
        runs.append((first, min(first + width, length) - first))
    return tuple(runs)
