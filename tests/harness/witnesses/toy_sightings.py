"""Sightings of a small ledger of four ranks, its closed form, and slips that a witness may make."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.ledger import Event
from harness.witnesses.agreement import Sighting, of_ledger

AXES = {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3))}
PLAN = (
    ("data", "", "broadcast", "tp", 8),
    ("forward", "layers.0.mlp", "all_reduce", "tp", 64),
    ("backward", "layers.0.mlp", "all_gather", "tp", 128),
    ("grad_sync", "", "all_reduce", "dp", 256),
)
Seen = list[Sighting]


@dataclass(frozen=True)
class Term:
    """A line of a closed form."""

    phase: str
    region: str
    op: str
    axis: str
    payload_bytes: int
    calls: int = 1
    reduce_op: str = ""
    group_size: int = 2
    dtype: str = "float32"


def event(rank: int, index: int, phase: str, region: str, op: str, axis: str, payload_bytes: int) -> Event:
    """One call of the plan as an event."""
    return Event(
        case="c",
        mode="tp",
        world_size=4,
        rank=rank,
        step=0,
        microbatch=0,
        phase=phase,
        region=region,
        op=op,
        reduce_op="",
        axis=axis,
        group_size=2,
        dtype="float32",
        shape="",
        payload_bytes=payload_bytes,
        wire_bytes=0,
        is_async=False,
        call_index=index,
        start_us=0.0,
        duration_us=0.0,
        caller="",
        group=next(ranks for ranks in AXES[axis] if rank in ranks),
    )


EVENTS = [event(rank, index, *line) for rank in range(4) for index, line in enumerate(PLAN)]
TERMS = [Term(*line) for line in PLAN]
LEDGER = of_ledger(EVENTS)


def changed(seen: Seen, rank: int, index: int, **words: object) -> Seen:
    """One sighting with other words."""
    return [replace(s, **words) if (s.rank, s.index) == (rank, index) else s for s in seen]  # type: ignore[arg-type]


def dropped(seen: Seen, rank: int, index: int) -> Seen:
    """Without one sighting."""
    left = [s for s in seen if (s.rank, s.index) != (rank, index)]
    return [replace(s, index=s.index - 1) if s.rank == rank and s.index > index else s for s in left]


def doubled(seen: Seen, rank: int, index: int) -> Seen:
    """One sighting twice."""
    later = [replace(s, index=s.index + 1) if s.rank == rank and s.index > index else s for s in seen]
    return [*later, *(replace(s, index=index + 1) for s in seen if (s.rank, s.index) == (rank, index))]


def swapped(seen: Seen, rank: int, index: int) -> Seen:
    """Two sightings in the other order."""
    other = {index: index + 1, index + 1: index}
    return [replace(s, index=other.get(s.index, s.index)) if s.rank == rank else s for s in seen]
