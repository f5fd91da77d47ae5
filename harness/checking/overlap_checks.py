"""Overlap: whether the calls that a closed form promises to hide travel while their rank computes.

A term with `hidden=True` promises that each of its calls is asynchronous and that a product is computed between its
issue and its first wait; a term without it promises nothing. Which calls were hidden is measured in the run that is
watched (harness.recording.overlap), in a dry run by its meter: the order of the program, and no time.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from harness.checking.evidence import FAIL, PASS, Evidence, Finding
from harness.differences import EventKey, key_of
from harness.ledger import Event

__all__ = ["overlap"]


def overlap(evidence: Evidence) -> Finding | None:
    """Whether as many calls as promised are hidden on every rank; a call that is missing is told by the ledger."""
    promised: Counter[EventKey] = Counter()
    for term in evidence.expectation or ():
        if getattr(term, "hidden", False):
            promised[key_of(term)] += term.calls
    if not promised or evidence.hidden is None:
        return None
    issued: dict[tuple[int, EventKey], list[Event]] = defaultdict(list)
    for event in evidence.events:
        if (line := key_of(event)) in promised:
            issued[event.rank, line].append(event)
    exposed: list[Event] = []
    for (_, line), events in issued.items():
        waited_at_once = [event for event in events if (event.rank, event.call_index) not in evidence.hidden]
        allowed = max(0, len(events) - promised[line])
        exposed += waited_at_once[allowed:]
    if not exposed:
        return Finding(verdict=PASS, message=f"{promised.total()} calls a rank travel behind products, as promised")
    first = min(exposed, key=lambda event: (event.call_index, event.rank))
    of_rank = sum(event.rank == first.rank for event in exposed)
    where = f"{first.phase} of {first.region or 'no module'} at {first.caller}"
    message = (
        f"{of_rank} of {promised.total()} calls of rank {first.rank} that should travel behind a product do not: the "
        f"first is {key_of(first)} in {where}, with no product between its issue and its wait"
    )
    return Finding(
        verdict=FAIL,
        message=message,
        ranks=tuple(sorted({event.rank for event in exposed})),
        phase=first.phase,
        region=first.region,
    )
