"""Which ranks stand for all in a dry run: one of every distinct place on the mesh.

A rank's place is, along every axis of more than one rank, the first, the last or a middle one. There programs treat
ranks differently. Ranks of one place are expected to do the same; the others of a class are not run.
"""

from collections.abc import Mapping

MOST_RANKS = 9
"""Ranks that are run at most: all places of a mesh of two axes."""

Axes = Mapping[str, tuple[tuple[int, ...], ...]]


def representatives(axes: Axes, world_size: int, most: int = MOST_RANKS) -> tuple[tuple[int, ...], int]:
    """Ranks of all places, one each, in their order, and how many places there are; at most `most` ranks.

    The first and the last rank come before the others, then the lowest rank of each place. These share groups with the
    first rank wherever a place allows it.
    """
    places = _places(axes, world_size)
    lowest: dict[tuple[str, ...], int] = {}
    for rank, place in enumerate(places):
        lowest.setdefault(place, rank)
    ends = (0,) if most == 1 else (0, world_size - 1)
    others = [rank for place, rank in lowest.items() if place not in {places[end] for end in ends}]
    chosen = {*ends, *others[: max(0, most - len(ends))]}
    return tuple(sorted(chosen)), len(lowest)


def _places(axes: Axes, world_size: int) -> list[tuple[str, ...]]:
    places: list[tuple[str, ...]] = [()] * world_size
    for lists in axes.values():
        for ranks in lists:
            if len(ranks) > 1:
                for index, rank in enumerate(ranks):
                    where = "first" if index == 0 else "last" if index == len(ranks) - 1 else "middle"
                    places[rank] = (*places[rank], where)
    return places
