"""Which ranks stand for all: one of every distinct place on the mesh, and whether those that meet say the same.

A rank's place is, along every axis of more than one rank, the first, the last or a middle one: that is where programs
treat ranks differently. Ranks of one place are expected to do the same; nobody looks at the others of a class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from harness.checking.laws import Broken, same_sequence
from harness.ledger import Event

__all__ = ["MOST_RANKS", "parted", "representatives", "sequences"]

MOST_RANKS = 9
"""Ranks that are run at most: all places of a mesh of two axes."""

Axes = Mapping[str, tuple[tuple[int, ...], ...]]


def representatives(axes: Axes, world_size: int, most: int = MOST_RANKS) -> tuple[tuple[int, ...], int]:
    """One rank of every place, in the order of ranks, and how many places there are; at most `most` ranks.

    The first and the last rank come before the others, then the lowest rank of each place: these share groups with the
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


def parted(events: Iterable[Event], axes: Axes) -> list[Broken]:
    """Where ranks of one group that were run issue different calls in it, or in another order."""
    by_rank = _by_rank(events)
    broken = []
    for axis, lists in axes.items():
        calls = {rank: [event for event in mine if event.axis == axis] for rank, mine in by_rank.items()}
        for ranks in lists:
            run = tuple(rank for rank in ranks if rank in by_rank)
            if len(run) > 1:
                broken += same_sequence(axis, run, calls)
    return broken


def sequences(events: Iterable[Event]) -> list[tuple[int, ...]]:
    """The ranks that were run, those together that issue the same calls in the same order, by their lowest rank."""
    classes: dict[tuple[object, ...], list[int]] = {}
    for rank, mine in _by_rank(events).items():
        said = tuple((e.axis, e.group_size, e.op, e.reduce_op, e.dtype, e.payload_bytes) for e in mine)
        classes.setdefault(said, []).append(rank)
    return [tuple(ranks) for ranks in classes.values()]


def _by_rank(events: Iterable[Event]) -> dict[int, Sequence[Event]]:
    ordered = sorted(events, key=attrgetter("rank", "call_index"))
    return {rank: list(mine) for rank, mine in groupby(ordered, key=attrgetter("rank"))}
