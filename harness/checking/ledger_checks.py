"""The ledger held against its expectation: the exact multiset of events on every rank, and the first difference.

Two events are equal when phase, region, op, reduce op, axis, group size, dtype and payload bytes are. A surplus event
and a lacking one of the same place become one "wrong" event. Differences are sorted as training runs: by phase, then by
module, in reverse for backward. Payloads are bytes; calls count over the whole run of one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from harness.checking.evidence import FAIL, PASS, UNKNOWN, Evidence, Finding, Worst
from harness.checking.laws import broken_laws
from harness.ledger import OTHER, PHASES, Event, unmapped
from harness.protocols import TermLike

__all__ = ["Difference", "Line", "differences", "ledger", "line_of", "module_order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What is compared of an event: the fields that an expectation states."""

    phase: str
    region: str
    op: str
    reduce_op: str
    axis: str
    group_size: int
    dtype: str
    payload_bytes: int

    def __str__(self) -> str:
        op = f"{self.op} {self.reduce_op}".strip()
        return f"{op} of {self.payload_bytes} B {self.dtype} over {self.axis} ({self.group_size} ranks)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One line on which ledger and expectation part: `expected` or `found` is None when the event is extra or missing.

    `calls` is by how many events they part on each of `ranks`; `caller` is where the found event was issued.
    """

    expected: Line | None
    found: Line | None
    calls: int
    ranks: tuple[int, ...]
    caller: str = ""

    @property
    def line(self) -> Line:
        """The found event, or the missing one."""
        line = self.found or self.expected
        assert line is not None  # a difference has at least one side
        return line

    @property
    def kind(self) -> str:
        """missing, extra or wrong."""
        return "missing" if self.found is None else "extra" if self.expected is None else "wrong"

    def __str__(self) -> str:
        place = f"{self.line.phase} of {self.line.region or 'no module'}"
        times = f"{self.calls} call{'s' if self.calls > 1 else ''}"
        if self.found and self.expected:
            moved = _place(self.expected) != _place(self.found)
            expected = f"{self.expected}" + (f" in {_place(self.expected)}" if moved else "")
            return f"wrong event in {place} ({times}): {self.found}; expected {expected}"
        return f"{self.kind} event in {place} ({times}): {self.line}"


def ledger(evidence: Evidence) -> Finding | None:
    """Whether every rank issued exactly the expected events; without an expectation, whether the general laws hold."""
    if names := unmapped(evidence.events):
        return _unmapped(names, [event for event in evidence.events if event.op == OTHER])
    world_size, ranks = evidence.case.world_size, evidence.ranks
    # The laws speak of all members of a group.
    broken = broken_laws(() if evidence.ran else evidence.events)
    if evidence.expectation is None:
        if broken:
            first = broken[0]
            return Finding(
                verdict=FAIL, message=first.message, ranks=first.ranks, phase=first.phase, region=first.region
            )
        if not evidence.events and world_size > 1:
            return None
        unchecked = ("closed form: the subject states no expectation",)
        return Finding(
            verdict=PASS, message=f"{len(evidence.events)} events obey the general laws", unchecked=unchecked
        )
    order = module_order(evidence)
    found = differences(evidence.events, evidence.expectation, ranks, order)
    if found:
        return _parted(found, len(ranks))
    if broken:
        first = broken[0]
        return Finding(verdict=FAIL, message=first.message, ranks=first.ranks, phase=first.phase, region=first.region)
    calls = sum(term.calls for term in evidence.expectation)
    return Finding(verdict=PASS, message=f"{calls} events a rank, exactly as expected")


def _unmapped(names: str, events: Sequence[Event]) -> Finding:
    """The finding on a run that issued operators of torch that are not known here."""
    first = events[0]
    calls = f"{len(events)} call{'s' if len(events) > 1 else ''}, the first at {first.caller or 'no user line'}"
    why = "what it sends is not known, so the ledger (op other) cannot be compared"
    return Finding(
        verdict=UNKNOWN,
        message=f"operator {names} of torch is not known to this release of shardproof ({calls}): {why}",
        unchecked=("ledger",),
        phase=first.phase,
        region=first.region,
    )


def _parted(found: Sequence[Difference], ranks_run: int) -> Finding:
    first = found[0]
    more = f"; {len(found) - 1} more lines differ" if len(found) > 1 else ""
    ranks = () if len(first.ranks) == ranks_run else first.ranks
    calls = sum(difference.calls for difference in found)
    return Finding(
        verdict=FAIL,
        message=f"{first}{more}",
        worst=Worst(name=f"{first.kind} {first.line.op}", error=float(calls), allowed=0.0, epsilons=0.0),
        ranks=ranks,
        phase=first.line.phase,
        region=first.line.region,
    )


def module_order(evidence: Evidence) -> tuple[str, ...]:
    """Modules as the forward pass meets them: the truth's activations, then regions of the ledger's forward."""
    from_truth = [name.removeprefix("act/") for name in evidence.truth if name.startswith("act/")]
    from_ledger = [event.region for event in evidence.events if event.phase == "forward"]
    from_terms = [term.region for term in evidence.expectation or () if term.phase == "forward"]
    return tuple(dict.fromkeys([*(from_truth or from_ledger), *from_ledger, *from_terms]))


def differences(
    events: Iterable[Event], terms: Iterable[TermLike], ranks: Iterable[int], order: Sequence[str] = ()
) -> list[Difference]:
    """Where the ledger parts from the expectation on any of these ranks, in the order in which training runs."""
    expected: Counter[Line] = Counter()
    for term in terms:
        expected[line_of(term)] += term.calls
    found: dict[int, Counter[Line]] = {rank: Counter() for rank in ranks}
    callers: dict[Line, str] = {}
    for event in events:
        line = line_of(event)
        found.setdefault(event.rank, Counter())[line] += 1
        callers.setdefault(line, event.caller)
    parted: dict[Difference, list[int]] = {}
    for rank, lines in found.items():
        for difference in _parts(lines - expected, expected - lines, callers):
            parted.setdefault(difference, []).append(rank)
    joined = [replace(difference, ranks=tuple(who)) for difference, who in parted.items()]
    places = {module: place for place, module in enumerate(order)}
    return sorted(joined, key=lambda difference: _when(difference.line, places))


def line_of(entry: Event | TermLike) -> Line:
    """What is compared of an event, or what a term of an expectation states of each of its events."""
    return Line(
        phase=entry.phase,
        region=entry.region,
        op=entry.op,
        reduce_op=entry.reduce_op,
        axis=entry.axis,
        group_size=entry.group_size,
        dtype=entry.dtype,
        payload_bytes=entry.payload_bytes,
    )


def _parts(surplus: Counter[Line], lack: Counter[Line], callers: dict[Line, str]) -> list[Difference]:
    """Surplus and lacking lines of one rank, joined where one stands in the other's place."""
    parts = []
    for same in (_site, _place, _traffic):
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


def _site(line: Line) -> object:
    return line.phase, line.region, line.op


def _place(line: Line) -> str:
    return f"{line.phase} of {line.region or 'no module'}"


def _traffic(line: Line) -> object:
    return line.op, line.reduce_op, line.axis, line.group_size, line.dtype, line.payload_bytes


def _when(line: Line, places: dict[str, int]) -> tuple[int, int]:
    """Sort key: phase, then module; backward phases meet the modules in reverse."""
    last = len(places)
    place = places.get(line.region, last)
    backwards = line.phase in ("backward", "recompute")
    phase = PHASES.index("backward" if backwards else line.phase) if line.phase in PHASES else len(PHASES)
    return phase, -place if backwards and place < last else place
