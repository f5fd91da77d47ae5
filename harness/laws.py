"""The general laws of communication, which hold for any subject, whatever it computes.

Members of a group issue the same sequence of collectives (op, reduce op, dtype; payload bytes too, but for all-to-alls
and rooted calls, whose members may rightly differ), and in every group what is sent is received: the same number of
messages and of bytes. Payloads are bytes.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.ledger import Event

__all__ = ["Broken", "broken_laws", "same_sequence"]

Group = tuple[int, ...]

_UNEVEN = ("all_to_all", "gather", "scatter", "reduce", "barrier")
_POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A law that a run broke: one line of words, and where."""

    message: str
    ranks: tuple[int, ...]
    phase: str
    region: str


def broken_laws(
    events: Iterable[Event], axes: Mapping[str, tuple[Group, ...]], world_size: int
) -> tuple[list[Broken], tuple[str, ...]]:
    """The broken laws, and what could not be looked at: axes whose groups nobody can tell."""
    groups: dict[tuple[str, Group], dict[int, list[Event]]] = {}
    unread: set[str] = set()
    for event in sorted(events, key=lambda e: (e.rank, e.call_index)):
        ranks = _group(event, axes, world_size)
        if ranks is None:
            unread.add(f"group {event.axis!r} of {event.group_size} ranks: its members are unknown")
        elif event.group_size > 1:
            groups.setdefault((event.axis, ranks), {}).setdefault(event.rank, []).append(event)
    broken = []
    for (axis, ranks), by_rank in groups.items():
        broken += same_sequence(axis, ranks, by_rank) + _received(axis, ranks, by_rank)
    return broken, tuple(sorted(unread))


def _group(event: Event, axes: Mapping[str, tuple[Group, ...]], world_size: int) -> Group | None:
    """The global ranks of an event's group, from its axis or from the rank list that stands in its place."""
    if event.group_size == 1:
        return (event.rank,)
    for ranks in axes.get(event.axis, ()):
        if event.rank in ranks and len(ranks) == event.group_size:
            return tuple(ranks)
    listed = tuple(int(rank) for rank in re.findall(r"\d+", event.axis))
    if len(listed) == event.group_size and event.rank in listed:
        return listed
    return tuple(range(world_size)) if event.group_size == world_size else None


def same_sequence(axis: str, ranks: Group, by_rank: Mapping[int, Sequence[Event]]) -> list[Broken]:
    """Where some ranks of a group part from the first of them: other calls, or another order; [] when nowhere."""
    calls = {rank: [e for e in by_rank.get(rank, ()) if e.op not in _POINT_TO_POINT] for rank in ranks}
    first = ranks[0]
    for rank in ranks[1:]:
        for place, (mine, theirs) in enumerate(itertools.zip_longest(calls[first], calls[rank])):
            if mine is None or theirs is None or _signature(mine) != _signature(theirs):
                message = (
                    f"the ranks of {axis} group {list(ranks)} part at its call {place}: "
                    f"rank {first} {_does(mine)}, rank {rank} {_does(theirs)}"
                )
                event = theirs or mine
                return [Broken(message=message, ranks=(first, rank), phase=event.phase, region=event.region)]
    return []


def _received(axis: str, ranks: Group, by_rank: Mapping[int, Sequence[Event]]) -> list[Broken]:
    moved = {op: [e for rank in ranks for e in by_rank.get(rank, ()) if e.op == op] for op in _POINT_TO_POINT}
    sent, received = (Counter((e.dtype, e.payload_bytes) for e in moved[op]) for op in _POINT_TO_POINT)
    if sent == received:
        return []
    event = (moved["send"] or moved["recv"])[0]
    message = (
        f"{axis} group {list(ranks)} sends {sent.total()} messages of {_total(moved['send'])} B and receives "
        f"{received.total()} of {_total(moved['recv'])} B"
    )
    return [Broken(message=message, ranks=ranks, phase=event.phase, region=event.region)]


def _signature(event: Event) -> object:
    payload = 0 if event.op in _UNEVEN else event.payload_bytes
    return event.op, event.reduce_op, event.dtype, payload


def _does(event: Event | None) -> str:
    if event is None:
        return "issues nothing more"
    op = f"{event.op} {event.reduce_op}".strip()
    return f"issues {op} of {event.payload_bytes} B {event.dtype} in {event.phase} of {event.region or 'no module'}"


def _total(events: Sequence[Event]) -> int:
    return sum(event.payload_bytes for event in events)
