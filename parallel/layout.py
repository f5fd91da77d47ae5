"""Layout: how one full tensor lies on one axis of the mesh, and the law that splitting and gathering are inverse.

    gather([shard(full, place, index=i, parts=p) for i in range(p)], place) == full        for every full, place, p

Offsets and sizes count elements of the full tensor. A fused weight is several sub-parameters one behind the other
along the split dim (`blocks`: w13 = w1, then w3); every block is split by itself. Padding rows exist in local tensors
only: they are zero, they follow the last real row, and no piece ever contains one.
Source of the needs: modes.md 8.2 (sub-parameters, granularity, exact inverse).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Placement", "Box", "gather", "local_shape", "pieces", "rows", "shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One box of a full tensor: `full[offsets : offsets + local.shape] == local`."""

    local: Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A full tensor of `shape` on a mesh axis: split along `dim`, or replicated when `axis` is "".

    `blocks` are the lengths along `dim` of the sub-parameters (none: one block, the whole dim); their sum exceeds
    `shape[dim]` by the padding. It is split at multiples of `unit` only (rows of one kv group).

    `held` replaces equal shares: for every rank of the axis, the ranges of elements along `dim` that it holds, in the
    order in which they lie there (shares may differ, and an element may lie on several ranks). `blocks` and `unit` have
    no meaning then. Raises ValueError for a `dim`, `blocks` or `held` that `shape` does not have.
    """

    shape: tuple[int, ...]
    axis: str = ""
    dim: int = 0
    blocks: tuple[int, ...] = ()
    unit: int = 1
    held: tuple[tuple[range, ...], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.shape):
            raise ValueError(f"dim={self.dim}: must be a dim of shape={self.shape}; legal: 0..{len(self.shape) - 1}")
        if sum(self.lengths) < self.shape[self.dim]:
            raise ValueError(
                f"blocks={self.blocks}: must cover the {self.shape[self.dim]} elements of dim {self.dim}; "
                f"legal: blocks={(self.shape[self.dim],)}"
            )
        for part in itertools.chain.from_iterable(self.held):
            if part.step != 1 or not 0 <= part.start <= part.stop <= self.shape[self.dim]:
                raise ValueError(
                    f"held={part}: must be a range of dim {self.dim} in steps of 1; "
                    f"legal: {range(self.shape[self.dim])}"
                )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the blocks along `dim`, padding included."""
        return self.blocks or (self.shape[self.dim],)


def local_shape(place: Placement, *, parts: int, index: int = 0) -> tuple[int, ...]:
    """Shape of the local tensor of rank `index` of `parts`, padding included; without `held` all ranks have the same.

    Raises ValueError when it cannot be split so.
    """
    if not place.axis:
        return place.shape
    width = _width(place, index, parts)
    return (*place.shape[: place.dim], width, *place.shape[place.dim + 1 :])


def shard(full: Tensor, place: Placement, *, index: int, parts: int) -> Tensor:
    """The local tensor of rank `index` of `parts`: its part of every block, padding rows zero.

    Raises ValueError when `full` has not the placement's shape, or cannot be split so.
    """
    if tuple(full.shape) != place.shape:
        raise ValueError(f"full.shape={tuple(full.shape)}: must be the placement's shape; legal: {place.shape}")
    if not place.axis:
        return full.clone()
    runs = [full.narrow(place.dim, start, length) for start, length in _runs(place, index, parts)]
    missing = _width(place, index, parts) - sum(run.shape[place.dim] for run in runs)
    padding = full.new_zeros((*place.shape[: place.dim], missing, *place.shape[place.dim + 1 :]))
    return torch.cat([*runs, padding], place.dim)


def pieces(local: Tensor, place: Placement, *, index: int, parts: int) -> tuple[Box, ...]:
    """The boxes of the full tensor that a local tensor holds; none for a rank that holds padding only."""
    if not place.axis:
        return (Box(local=local, offsets=(0,) * local.dim(), global_shape=place.shape),)
    found, taken = [], 0
    for start, length in _runs(place, index, parts):
        offsets = tuple(start if dim == place.dim else 0 for dim in range(local.dim()))
        if length:
            box = local.narrow(place.dim, taken, length)
            found.append(Box(local=box, offsets=offsets, global_shape=place.shape))
        taken += length
    return tuple(found)


def rows(boxes: Sequence[Box], *, first: int, total: int) -> tuple[Box, ...]:
    """Boxes of a tensor as boxes of a taller one: dim 0 has `total` rows there, and these begin at row `first`."""
    return tuple(
        Box(
            local=box.local,
            offsets=(first + box.offsets[0], *box.offsets[1:]),
            global_shape=(total, *box.global_shape[1:]),
        )
        for box in boxes
    )


def gather(locals_: Sequence[Tensor], place: Placement) -> Tensor:
    """The full tensor from the local tensors of all ranks of the axis, in their order: the inverse of `shard`."""
    if not place.axis:
        return locals_[0].clone()
    full = locals_[0].new_empty(place.shape)
    for index, local in enumerate(locals_):
        for piece in pieces(local, place, index=index, parts=len(locals_)):
            start = piece.offsets[place.dim]
            full.narrow(place.dim, start, piece.local.shape[place.dim]).copy_(piece.local)
    return full


def _widths(place: Placement, parts: int) -> list[int]:
    """One rank's share of every block."""
    for length in place.lengths:
        if length % (parts * place.unit):
            whole = parts * place.unit
            raise ValueError(
                f"blocks={place.lengths}: each must be a multiple of {parts} ranks x {place.unit} elements; "
                f"legal: {-(-length // whole) * whole}"
            )
    return [length // parts for length in place.lengths]


def _width(place: Placement, index: int, parts: int) -> int:
    """Elements along `dim` of one rank's local tensor, padding included."""
    return sum(map(len, _held(place, index, parts))) if place.held else sum(_widths(place, parts))


def _held(place: Placement, index: int, parts: int) -> tuple[range, ...]:
    if len(place.held) != parts:
        raise ValueError(f"parts={parts}: held says what {len(place.held)} ranks hold; legal: {len(place.held)}")
    return place.held[index]


def _runs(place: Placement, index: int, parts: int) -> list[tuple[int, int]]:
    """(start, length) of this rank's real elements along `dim`, one run a block, padding left out."""
    if place.held:
        return [(part.start, len(part)) for part in _held(place, index, parts)]
    end = place.shape[place.dim]
    starts = itertools.accumulate(place.lengths, initial=0)
    runs = []
    for start, width in zip(starts, _widths(place, parts), strict=False):
        first = min(start + index * width, end)
        runs.append((first, min(first + width, end) - first))
    return runs
