"""Which elements of one dim of a tensor every rank holds: ranges, in the order in which they lie on the rank.

Numbers count elements of that dim (rows or columns), or units of several elements each (heads) until `in_units`.
"""

from collections.abc import Iterable, Sequence

Ranges = tuple[range, ...]
"""Elements of one rank, in the order in which it holds them."""
Held = tuple[Ranges, ...]
"""Elements of every rank, by rank."""


def in_turn(sizes: Sequence[int], *, first: int = 0) -> Held:
    """Rank i holds the next sizes[i] elements, the first rank from element `first` on."""
    found: list[Ranges] = []
    for size in sizes:
        found.append(joined([range(first, first + size)]))
        first += size
    return tuple(found)


def beside(*parts: Held) -> Held:
    """Every rank holds what it holds of each part, one part behind the other."""
    return tuple(joined(part for ranges in own for part in ranges) for own in zip(*parts, strict=True))


def in_units(held: Held, size: int) -> Held:
    """The elements of units of `size` elements each."""
    return tuple(tuple(range(part.start * size, part.stop * size) for part in ranges) for ranges in held)


def joined(ranges: Iterable[range]) -> Ranges:
    """These elements in their order with as few ranges as possible."""
    found: list[range] = []
    for part in ranges:
        if part and found and found[-1].stop == part.start:
            found[-1] = range(found[-1].start, part.stop)
        elif part:
            found.append(part)
    return tuple(found)


def widths(held: Held) -> tuple[int, ...]:
    """How many elements each rank holds."""
    return tuple(sum(map(len, ranges)) for ranges in held)


def times_held(held: Held, length: int) -> list[int]:
    """For each of `length` elements, how many times it is held, over all ranks."""
    times = [0] * length
    for ranges in held:
        for part in ranges:
            for element in part:
                times[element] += 1
    return times
