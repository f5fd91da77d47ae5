"""Overlap: whether the calls that a closed form promises to hide travel while their rank computes.

A term with `hidden=True` promises that each of its calls is asynchronous and that a product is computed between its
issue and its first wait; a term without it promises nothing. Which calls were hidden is measured in the run that is
watched (harness.recording.measures), in a dry run by its meter: the order of the program, and no time.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from harness.checking.evidence import FAIL, PASS, Evidence, Finding
from harness.ledger import Event
from harness.terms import EventKey, Term, closed_forms, key_of

__all__ = ["overlap"]


def overlap(evidence: Evidence) -> Finding | None:
    """Whether as many calls as promised are hidden on every rank; a missing call is reported by the ledger check."""
    hidden = [term for term in evidence.expectation or () if getattr(term, "hidden", False)]
    if not hidden or evidence.hidden is None:
        return None
    forms = closed_forms(hidden, {*evidence.ranks, *(event.rank for event in evidence.events)}, evidence.axes)
    issued: dict[tuple[int, EventKey | Term], list[Event]] = defaultdict(list)
    for event in evidence.events:
        for counting in forms[event.rank].counting(key_of(event)):
            issued[event.rank, counting].append(event)
    promised: dict[int, Counter[EventKey | Term]] = {}
    for rank, form in forms.items():
        promised[rank] = Counter(form.complete)
        for term in form.partial:  # one without a number promises it of all its calls
            found = max((len(events) for (_, counting), events in issued.items() if counting == term), default=0)
            promised[rank][term] = found if term.calls is None else term.calls
    exposed: list[Event] = []
    for (rank, counting), events in issued.items():
        waited_at_once = [event for event in events if (event.rank, event.call_index) not in evidence.hidden]
        allowed = max(0, len(events) - promised[rank][counting])
        exposed += waited_at_once[allowed:]
    if not exposed:
        most = max(of_rank.total() for of_rank in promised.values())
        return Finding(verdict=PASS, message=f"{most} calls a rank travel behind products, as promised")
    first = min(exposed, key=lambda event: (event.call_index, event.rank))
    of_rank = sum(event.rank == first.rank for event in exposed)
    where = f"{first.phase} of {first.region or 'no module'} at {first.caller}"
    message = (
        f"{of_rank} of {promised[first.rank].total()} calls of rank {first.rank} that should travel behind a product "
        f"do not: the first is {key_of(first)} in {where}, with no product between its issue and its wait"
    )
    return Finding(
        verdict=FAIL,
        message=message,
        ranks=tuple(sorted({event.rank for event in exposed})),
        phase=first.phase,
        region=first.region,
    )
