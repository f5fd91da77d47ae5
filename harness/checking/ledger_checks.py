"""Checks of calls: every rank issued exactly the events of the closed form, and the general laws hold; calls that
should be hidden are; and every call ran over ranks that the axis of its group stands for.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from harness.checking.evidence import FAIL, PASS, UNKNOWN, Evidence, Finding, Worst
from harness.checking.laws import Broken, broken_laws
from harness.differences import Difference, differences
from harness.ledger import NO_UPDATE, OTHER, Event, unmapped
from harness.protocols import Axes, TermLike
from harness.terms import FIELDS, EventKey, Term, closed_forms, key_of, unseen, visible


def ledger(evidence: Evidence) -> Finding | None:
    """Whether every rank issued exactly the expected events; without an expectation, whether the general laws hold."""
    if names := unmapped(evidence.events):
        return _unmapped(names, [event for event in evidence.events if event.op == OTHER])
    world_size, ranks = evidence.case.world_size, evidence.ranks
    # The laws speak of all members of a group.
    broken = broken_laws(() if evidence.ran else evidence.events)
    if evidence.expectation is None:
        if broken:
            return unlawful(broken[0])
        if not evidence.events and world_size > 1:
            return None
        unchecked = ("closed form: the subject states no expectation", *_doubts(evidence))
        return Finding(
            verdict=PASS, message=f"{len(evidence.events)} events obey the general laws", unchecked=unchecked
        )
    order = module_order(evidence)
    found = differences(evidence.events, evidence.expectation, ranks, order, axes=evidence.axes)
    if found:
        return _parted(found, len(ranks))
    if broken:
        return unlawful(broken[0])
    return _expected(evidence, evidence.expectation)


def _expected(evidence: Evidence, terms: Sequence[TermLike]) -> Finding:
    """The finding on a ledger that is as these terms state; what they leave out is unchecked."""
    forms = closed_forms(visible(terms), evidence.ranks, evidence.axes).values()
    partial = [term for form in forms for term in form.partial]
    if not partial:
        least, most = (pick(form.complete.total() for form in forms) for pick in (min, max))
        message = f"{least if least == most else f'{least} to {most}'} events a rank, exactly as expected"
        return Finding(verdict=PASS, message=message, unchecked=(*_carried(terms), *_doubts(evidence)))
    left_out = [name for name in (*FIELDS, "calls") if any(name in term.left_out for term in partial)]
    most = max(Counter(event.rank for event in evidence.events).values(), default=0)
    return Finding(
        verdict=PASS,
        message=f"{most} events a rank, as the closed form states",
        unchecked=(f"closed form: its terms leave out {', '.join(left_out)}", *_carried(terms), *_doubts(evidence)),
    )


def _carried(terms: Sequence[TermLike]) -> tuple[str, ...]:
    """The expected calls that no recorder sees, by what carries them."""
    calls: dict[tuple[str, str], list[int | None]] = defaultdict(list)
    for term in unseen(terms):
        calls[term.carrier, f"{term.op or 'call'} over {term.axis or 'any axis'}"].append(term.calls)
    return tuple(
        f"{'any number of' if None in numbers else sum(filter(None, numbers))} {what}, expected and carried by "
        f"{carrier}, which no recorder sees"
        for (carrier, what), numbers in sorted(calls.items())
    )


def _doubts(evidence: Evidence) -> tuple[str, ...]:
    """What the recorder could not know for certain; a run of one step has its step right."""
    doubts = dict.fromkeys(doubt for event in evidence.events for doubt in event.doubts)
    return tuple(sorted(doubt for doubt in doubts if doubt != NO_UPDATE or evidence.case.steps > 1))


def unlawful(first: Broken) -> Finding:
    """The finding on a run that breaks this law first."""
    return Finding(verdict=FAIL, message=first.message, ranks=first.ranks, phase=first.phase, region=first.region)


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
        worst=Worst(name=f"{first.kind} {first.line.op}".strip(), error=float(calls), allowed=0.0, epsilons=0.0)
        if calls
        else None,
        ranks=ranks,
        phase=first.line.phase,
        region=first.line.region,
    )


def module_order(evidence: Evidence) -> tuple[str, ...]:
    """Modules as the forward pass meets them: the truth's activations, then regions of the ledger's forward."""
    from_truth = [name.removeprefix("act/") for name in evidence.truth if name.startswith("act/")]
    from_ledger = [event.region for event in evidence.events if event.phase == "forward"]
    from_terms = [term.region for term in evidence.expectation or () if term.phase == "forward" and term.region]
    return tuple(dict.fromkeys([*(from_truth or from_ledger), *from_ledger, *from_terms]))


def waits(evidence: Evidence) -> Finding | None:
    """Whether every asynchronous call was waited for: one that never was may be used before it is complete."""
    if not evidence.unwaited:
        started = sum(event.is_async for event in evidence.events)
        return Finding(verdict=PASS, message=f"all {started} asynchronous calls were waited for") if started else None
    first = evidence.unwaited[0]
    more = f"; {len(evidence.unwaited) - 1} more like it" if len(evidence.unwaited) > 1 else ""
    message = f"{first.op} #{first.number} of {first.group} at {first.caller} was never waited for{more}"
    return Finding(verdict=FAIL, message=message, ranks=tuple(sorted({work.rank for work in evidence.unwaited})))


def overlap(evidence: Evidence) -> Finding | None:
    """Whether as many calls as promised are hidden on every rank; a missing call is reported by the ledger check.

    A term with `hidden=True` promises that each of its calls is asynchronous and that a product is computed between its
    issue and its first wait; a term without it promises nothing. Which calls were hidden is measured in the run that is
    watched (harness.recording.measures), in a dry run by its meter: the order of the program, and no time.
    """
    hidden = [term for term in evidence.expectation or () if getattr(term, "hidden", False)]
    if not hidden or evidence.hidden is None:
        return None
    forms = closed_forms(visible(hidden), {*evidence.ranks, *(event.rank for event in evidence.events)}, evidence.axes)
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


def groups(evidence: Evidence) -> Finding | None:
    """Whether the group of every event is a rank list of its axis.

    The axis of an event is the name that the program gave its group ("wp", DeviceMesh's "mesh_wp"). The ledger compares
    names, so a group of this name over other ranks agrees with the closed form, and when the same is done everywhere
    with every number too. The rank lists of an axis are the case's, or those of `subject.axes(case)` for another rank
    order. The axis "dp_cp" joins those two: its groups are the ranks that are together in one of their lists, or by way
    of others. The order within a group is not compared: torch sorts the ranks of every group.
    """
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
