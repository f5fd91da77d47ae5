"""Groups: whether every call ran over ranks that the axis of its group stands for.

The axis of an event is the name that the program gave its group ("wp", DeviceMesh's "mesh_wp"). The ledger compares
names, so a group of this name over other ranks agrees with the closed form, and when the same is done everywhere with
every number too. The rank lists of an axis are the case's, or those of `subject.axes(case)` for another rank order.
The axis "dp_cp" joins those two: its groups are the ranks that are together in one of their lists, or by way of others.
The order within a group is not compared: torch sorts the ranks of every group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from harness.checking.evidence import FAIL, PASS, Evidence, Finding
from harness.ledger import Event
from harness.protocols import Axes


def groups(evidence: Evidence) -> Finding | None:
    """Whether the group of every event is a rank list of its axis."""
    if not evidence.events:
        return None
    axes = {event.axis for event in evidence.events}
    unnamed = axes - _legal(evidence.axes, axes).keys() - {"world"}
    unchecked = tuple(f"group {axis}: no axis of the case or of subject.axes(case) has this name" for axis in unnamed)
    found = strays(evidence)
    if not found:
        named = ", ".join(sorted(axes - unnamed)) or "no axis"
        message = f"every group named {named} is a rank list of its axis"
        return Finding(verdict=PASS, message=message, unchecked=tuple(sorted(unchecked)))
    first = found[0]
    axis, ran = first.axis, [event.group for event in found if event.axis == first.axis]
    rule = f"are no rank lists of axis {axis}: {lists_text(_legal(evidence.axes, axes)[axis])}"
    legal = "the groups of these ranks, or subject.axes(case) that states another rank order"
    return Finding(
        verdict=FAIL,
        message=f"{len(ran)} calls named {axis} run over the ranks {lists_text(ran)}, which {rule}; legal: {legal}",
        unchecked=tuple(sorted(unchecked)),
        ranks=tuple(sorted({event.rank for event in found})),
        phase=first.phase,
        region=first.region,
    )


def strays(evidence: Evidence) -> Sequence[Event]:
    """The events whose group is no rank list of the axis that it is named after, by call index and rank."""
    axes = {event.axis for event in evidence.events}
    legal = {axis: {frozenset(ranks) for ranks in lists} for axis, lists in _legal(evidence.axes, axes).items()}
    found = [
        event for event in evidence.events if event.axis in legal and frozenset(event.group) not in legal[event.axis]
    ]
    return sorted(found, key=lambda event: (event.call_index, event.rank))


def _legal(axes: Axes, names: Iterable[str]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The rank lists of every axis of the case and of those of these names that join some, such as "dp_cp"."""
    joint = {name: name.split("_") for name in names if name not in axes}
    return {**axes, **{name: _joined(axes, parts) for name, parts in joint.items() if set(parts) <= axes.keys()}}


def _joined(axes: Axes, parts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The rank lists in which the ranks of every list of these axes are together."""
    joined: list[set[int]] = []
    for ranks in itertools.chain.from_iterable(axes[part] for part in parts):
        touching = [together for together in joined if together & set(ranks)]
        joined = [together for together in joined if together not in touching]
        joined.append(set(ranks).union(*touching))
    return tuple(tuple(sorted(together)) for together in joined)


def lists_text(lists: Iterable[Sequence[int]]) -> str:
    """Rank lists as messages print them, each once and at most four: "[0, 1] [2, 3]"."""
    texts = sorted({str(sorted(ranks)) for ranks in lists})
    return " ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")
