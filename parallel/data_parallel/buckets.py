"""Flat buffers of data parallelism: how parameters lie in buckets, and which elements of a bucket each rank owns.

Parameters lie end to end in reverse order of registration, roughly the order in which backward completes gradients. A
bucket is closed as soon as it holds `largest` elements, and travels in one collective. Where ranks own parts of it
(ZeRO-1) parameters start at multiples of 64 elements, and a bucket is padded to a multiple of lcm(ranks, 128). The
padding travels too, and belongs to no parameter.

    rank r of n owns elements [start + r*B/n, start + (r+1)*B/n) of a bucket of B, across borders of parameters

Units: elements. Source: Megatron-Core 0.16.1 `_ParamAndGradBuffer` and `DistributedOptimizer._build_model_gbuf_range`
(around.md 15.1); arXiv:1910.02054 for ZeRO.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

ALIGNMENT = 64
"""Elements to a multiple of which a parameter's start is padded, where buckets are sharded."""
DIVISOR = 128
"""A sharded bucket's size is a multiple of this and of its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where one flattened parameter lies in the buffer: elements [start, end)."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Elements [start, end) of the buffer, padding included, and the parameters in it in their order there."""

    start: int
    end: int
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """Elements that travel, padding included."""
        return self.end - self.start

    def owned(self, rank: int, ranks: int) -> range:
        """The elements of the buffer that a rank owns. Raises ValueError when there are no equal parts."""
        if self.size % ranks:
            raise ValueError(
                f"ranks={ranks}: must divide the {self.size} elements of the bucket; legal: sharded buckets"
            )
        width = self.size // ranks
        return range(self.start + rank * width, self.start + (rank + 1) * width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Elements [first, last) of a flattened parameter, which lie in a rank's part of a bucket from element `at` on."""

    name: str
    first: int
    last: int
    at: int


def bucketed(
    sizes: Mapping[str, int], *, ranks: int, sharded: bool, largest: int = 0, apart: Collection[str] = ()
) -> tuple[Bucket, ...]:
    """The buckets of parameters, given as name -> elements in order of registration.

    `largest` 0: one bucket of any size. `apart`: parameters that get a bucket of their own where buckets are sharded.
    An embedding shared by two pipeline stages is such a parameter: both cut it alike.
    """
    unit, divisor = (ALIGNMENT, math.lcm(ranks, DIVISOR)) if sharded else (1, 1)
    found: list[Bucket] = []
    slots: list[Slot] = []
    first = end = 0

    def close(at: int) -> int:
        bucket = Bucket(start=first, end=_ceil(at, divisor), slots=tuple(slots))
        found.append(bucket)
        slots.clear()
        return bucket.end

    for name in reversed([*sizes]):
        start = _ceil(end, unit)
        alone = sharded and name in apart
        if alone and slots:
            first = start = close(start)
        end = start + sizes[name]
        slots.append(Slot(name=name, start=start, end=end))
        if alone or 0 < largest <= end - first:
            first = end = close(end)
    if slots:
        close(end)
    return tuple(found)


def shares(bucket: Bucket, rank: int, ranks: int) -> Iterator[Share]:
    """Parts of parameters that this rank owns in a bucket; parameters outside its part are left out."""
    owned = bucket.owned(rank, ranks)
    for slot in bucket.slots:
        first, last = max(slot.start, owned.start), min(slot.end, owned.stop)
        if first < last:
            yield Share(name=slot.name, first=first - slot.start, last=last - slot.start, at=first - owned.start)


def _ceil(size: int, unit: int) -> int:
    return -(-size // unit) * unit
