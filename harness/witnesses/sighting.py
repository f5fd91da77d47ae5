"""What one witness saw of one collective, and the ledger in the same words.

A witness that cannot know a field leaves it open: no `groups`, several `groups` (it is one of them), payload_bytes
UNKNOWN, phase or region "", step -1. Times are microseconds on the witness's own clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.ledger import Event

UNKNOWN = -1
"""Bytes that a witness does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One collective on one rank as a witness saw it; `index` counts the rank's sightings in order of issue."""

    rank: int
    index: int
    op: str
    groups: tuple[tuple[int, ...], ...] = ()
    payload_bytes: int = UNKNOWN
    phase: str = ""
    region: str = ""
    step: int = -1
    start_us: float = 0.0
    duration_us: float = 0.0


def of_ledger(events: Iterable[Event], *, steps: range | None = None) -> list[Sighting]:
    """The recorder's own sightings, by rank and order of issue; of these steps only when they are given."""
    counts: dict[int, int] = {}
    seen = []
    for event in sorted(events, key=lambda event: (event.rank, event.call_index)):
        if steps is not None and event.step not in steps:
            continue
        index = counts.setdefault(event.rank, 0)
        counts[event.rank] += 1
        seen.append(
            Sighting(
                rank=event.rank,
                index=index,
                op=event.op,
                groups=(tuple(sorted(event.group)),),
                payload_bytes=event.payload_bytes,
                phase=event.phase,
                region=event.region,
                step=event.step,
                start_us=event.start_us,
                duration_us=event.duration_us,
            )
        )
    return seen


def in_words(seen: Sighting) -> str:
    """ "backward all_reduce of 512 B over 0,1"; what the witness does not know is "?"."""
    payload = "?" if seen.payload_bytes == UNKNOWN else str(seen.payload_bytes)
    return f"{seen.phase or '?'} {seen.op} of {payload} B over {group_text(seen)}"


def group_text(seen: Sighting) -> str:
    """The ranks of the group, "0,1"; several when it is one of them, "?" when it is unknown."""
    return " or ".join(",".join(map(str, group)) for group in seen.groups[:3]) or "?"
