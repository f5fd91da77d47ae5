"""A ledger compared with a closed form: the exact multiset of events on every rank, and where the two first differ.

Two events are equal when their keys are: phase, region, op, reduce op, axis, group size, dtype and payload bytes. A
surplus event and a missing one of the same place become one "wrong" event. Differences are sorted as training runs: by
phase, then by module, in reverse for backward. Payloads are bytes; calls count over the whole run of one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from harness.ledger import PHASES, Event
from harness.protocols import TermLike

__all__ = ["Difference", "EventKey", "differences", "key_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventKey:
    """What is compared of an event: the fields that an expectation states."""

    phase: str
    region: str
    op: str
    reduce_op: str
    axis: str
    group_size: int
    dtype: str
    payload_bytes: int

    @property
    def site(self) -> tuple[str, str, str]:
        """Phase, region and op."""
        return self.phase, self.region, self.op

    @property
    def place(self) -> str:
        """Phase and region in words: "forward of head"."""
        return f"{self.phase} of {self.region or 'no module'}"

    def __str__(self) -> str:
        op = f"{self.op} {self.reduce_op}".strip()
        return f"{op} of {self.payload_bytes} B {self.dtype} over {self.axis} ({self.group_size} ranks)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One key on which ledger and closed form differ: `expected` or `found` is None when the event is extra or missing.

    `calls` is by how many events they differ on each of `ranks`; `caller` is where the found event was issued.
    """

    expected: EventKey | None
    found: EventKey | None
    calls: int
    ranks: tuple[int, ...]
    caller: str = ""

    @property
    def line(self) -> EventKey:
        """The found event, or the missing one."""
        line = self.found or self.expected
        assert line is not None  # a difference has at least one side
        return line

    @property
    def kind(self) -> str:
        """missing, extra or wrong."""
        return "missing" if self.found is None else "extra" if self.expected is None else "wrong"

    def __str__(self) -> str:
        place = self.line.place
        times = f"{self.calls} call{'s' if self.calls > 1 else ''}"
        if self.found and self.expected:
            moved = self.expected.place != self.found.place
            expected = f"{self.expected}" + (f" in {self.expected.place}" if moved else "")
            return f"wrong event in {place} ({times}): {self.found}; expected {expected}"
        return f"{self.kind} event in {place} ({times}): {self.line}"


def differences(
    events: Iterable[Event], terms: Iterable[TermLike], ranks: Iterable[int], order: Sequence[str] = ()
) -> list[Difference]:
    """Where the ledger parts from the expectation on any of these ranks, in the order in which training runs."""
    expected: Counter[EventKey] = Counter()
    for term in terms:
        expected[key_of(term)] += term.calls
    found: dict[int, Counter[EventKey]] = {rank: Counter() for rank in ranks}
    callers: dict[EventKey, str] = {}
    for event in events:
        line = key_of(event)
        found.setdefault(event.rank, Counter())[line] += 1
        callers.setdefault(line, event.caller)
    parted: dict[Difference, list[int]] = {}
    for rank, lines in found.items():
        for difference in _parts(lines - expected, expected - lines, callers):
            parted.setdefault(difference, []).append(rank)
    joined = [replace(difference, ranks=tuple(who)) for difference, who in parted.items()]
    places = {module: place for place, module in enumerate(order)}
    return sorted(joined, key=lambda difference: _when(difference.line, places))


def key_of(entry: Event | TermLike) -> EventKey:
    """What is compared of an event, or what a term of an expectation states of each of its events."""
    return EventKey(
        phase=entry.phase,
        region=entry.region,
        op=entry.op,
        reduce_op=entry.reduce_op,
        axis=entry.axis,
        group_size=entry.group_size,
        dtype=entry.dtype,
        payload_bytes=entry.payload_bytes,
    )


def _parts(surplus: Counter[EventKey], lack: Counter[EventKey], callers: dict[EventKey, str]) -> list[Difference]:
    """Surplus and lacking lines of one rank, joined where one stands in the other's place."""
    parts = []
    for same in (attrgetter("site"), attrgetter("place"), str):
        for missing in list(lack):
            match = next((line for line in surplus if same(line) == same(missing) and surplus[line] > 0), None)
            if match is None:
                continue
            calls = min(surplus[match], lack[missing])
            parts.append(Difference(expected=missing, found=match, calls=calls, ranks=(), caller=callers[match]))
            surplus, lack = surplus - Counter({match: calls}), lack - Counter({missing: calls})
    parts += [Difference(expected=None, found=x, calls=n, ranks=(), caller=callers[x]) for x, n in surplus.items()]
    parts += [Difference(expected=x, found=None, calls=n, ranks=()) for x, n in lack.items()]
    return parts


def _when(line: EventKey, places: dict[str, int]) -> tuple[int, int]:
    """Sort key: phase, then module; backward phases meet the modules in reverse."""
    last = len(places)
    place = places.get(line.region, last)
    backwards = line.phase in ("backward", "recompute")
    phase = PHASES.index("backward" if backwards else line.phase) if line.phase in PHASES else len(PHASES)
    return phase, -place if backwards and place < last else place
