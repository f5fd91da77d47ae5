"""Checks of how ranks communicate: over the ranks of an axis, waited for, hidden as promised, in parallel at all."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.laws import group_events, same_sequence
from shardproof.harness.checking.ledger_checks import report_broken_law
from shardproof.harness.checking.records import Calls, Claims, DryRun, RecordedRun
from shardproof.harness.ledger import Event
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.outcome.merging import Outcomes
from shardproof.harness.protocols import Axes
from shardproof.harness.terms import EventKey, Term, closed_forms, key_of, select_visible_terms
from shardproof.harness.verdicts.facts import Note, NoteKind, note_unchecked, state_fact
from shardproof.harness.verdicts.verdict import FAIL, PASS


def check_groups(calls: Calls, claims: Claims) -> Finding | None:
    """Whether the group of every event is a rank list of its axis.

    The axis of an event is the name that the program gave its group ("wp", DeviceMesh's "mesh_wp"). The ledger compares
    names, so a group of this name over other ranks agrees with the closed form, and if all ranks do the same, every
    number agrees too. The rank lists of an axis are the case's, or those of `subject.axes(case)` for another rank
    order. The axis "dp_cp" joins those two: its groups are the connected components of their rank lists. The order
    within a group is not compared, since torch sorts the ranks of every group.
    """
    if not calls.events:
        return None
    axes = {event.axis for event in calls.events}
    unnamed = axes - _legal_groups(claims.axes, axes).keys() - {"world"}
    notes = note_unchecked(
        *(f"group {axis}: no axis of the case or of subject.axes(case) has this name" for axis in sorted(unnamed))
    )
    stray = find_strays(calls, claims)
    if not stray:
        return Finding(verdict=PASS, facts=(state_fact("groups_right", axes=sorted(axes - unnamed)),), notes=notes)
    first = stray[0]
    axis, ran = first.axis, [event.group for event in stray if event.axis == first.axis]
    lists = _legal_groups(claims.axes, axes)[axis]
    return Finding(
        verdict=FAIL,
        facts=(state_fact("stray_groups", count=len(ran), axis=axis, ran={*ran}, lists=lists),),
        kind="stray",
        notes=notes,
        ranks=tuple(sorted({event.rank for event in stray})),
        phase=first.phase,
        region=first.region,
    )


def find_strays(calls: Calls, claims: Claims) -> Sequence[Event]:
    """The events whose group is no rank list of the axis that it is named after, by call index and rank."""
    axes = {event.axis for event in calls.events}
    legal = {axis: {frozenset(ranks) for ranks in lists} for axis, lists in _legal_groups(claims.axes, axes).items()}
    stray = [event for event in calls.events if event.axis in legal and frozenset(event.group) not in legal[event.axis]]
    return sorted(stray, key=lambda event: (event.call_index, event.rank))


def _legal_groups(axes: Axes, names: Iterable[str]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The rank lists of every axis of the case, and of those of these names that join several axes, such as "dp_cp"."""
    joint = {name: name.split("_") for name in names if name not in axes}
    return {
        **axes,
        **{name: _connected_ranks(axes, parts) for name, parts in joint.items() if set(parts) <= axes.keys()},
    }


def _connected_ranks(axes: Axes, parts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The connected components of the rank lists of these axes, as rank lists."""
    joined: list[set[int]] = []
    for ranks in itertools.chain.from_iterable(axes[part] for part in parts):
        touching = [together for together in joined if together & set(ranks)]
        joined = [together for together in joined if together not in touching]
        joined.append(set(ranks).union(*touching))
    return tuple(tuple(sorted(together)) for together in joined)


def check_order(calls: Calls, dry: DryRun) -> Finding:
    """Whether ranks that share a group issue the same calls in it in the same order.

    Only dry runs need this check. In other runs the engine raises if ranks issue different calls.
    """
    if broken := same_sequence(group_events(calls.events), calls.ran):
        return report_broken_law(broken[0])
    sequences: dict[tuple[str, ...], list[int]] = {}
    ordered = sorted(calls.events, key=attrgetter("rank", "call_index"))
    for rank, events in itertools.groupby(ordered, key=attrgetter("rank")):
        sequences.setdefault(tuple(str(key_of(event)) for event in events), []).append(rank)
    alike = list(sequences.values()) or [list(calls.ran)]
    equal = state_fact("equal_sequences", ran=len(calls.ran), ranks=calls.case.world_size, classes=alike)
    return Finding(verdict=PASS, facts=(equal, dry.memory), notes=dry.notes)


def check_waits(calls: Calls) -> Finding | None:
    """Whether every asynchronous call was waited for. Without a wait its result may be used before it is complete.

    Reading the result of a functional collective waits for it, so one that was never waited for was never read.
    """
    if not calls.unwaited:
        started = sum(event.is_async for event in calls.events)
        return Finding(verdict=PASS, facts=(state_fact("all_waited", count=started),)) if started else None
    first, others = calls.unwaited[0], len(calls.unwaited) - 1
    lost = state_fact("never_waited", op=first.op, number=first.number, group=first.group, caller=first.caller)
    more = (state_fact("more_like_it", count=others),) if others else ()
    ranks = tuple(sorted({work.rank for work in calls.unwaited}))
    return Finding(verdict=FAIL, facts=(lost, *more), kind=f"{first.op} not waited for", ranks=ranks)


def check_overlap(calls: Calls, claims: Claims) -> Finding | None:
    """Whether as many calls as promised are hidden on every rank; the check of the ledger reports missing calls.

    A term with `hidden=True` promises that each of its calls is asynchronous and that a product is computed between its
    issue and its first wait. A term without it promises nothing. Hidden calls are measured in the recorded run
    (harness.recording.measures); in a dry run the meter finds them by the order of the program.
    """
    hidden = [term for term in claims.expectation or () if getattr(term, "hidden", False)]
    if not hidden or calls.hidden is None:
        return None
    forms = closed_forms(
        select_visible_terms(hidden), {*calls.ranks, *(event.rank for event in calls.events)}, claims.axes
    )
    issued: dict[tuple[int, EventKey | Term], list[Event]] = defaultdict(list)
    for event in calls.events:
        for counting in forms[event.rank].find_counting_terms(key_of(event)):
            issued[event.rank, counting].append(event)
    promised: dict[int, Counter[EventKey | Term]] = {}
    for rank, form in forms.items():
        promised[rank] = Counter(form.complete)
        for term in form.partial:  # a term without a number of calls promises all of them
            issued_calls = max((len(events) for (_, counting), events in issued.items() if counting == term), default=0)
            promised[rank][term] = issued_calls if term.calls is None else term.calls
    exposed: list[Event] = []
    for (rank, counting), events in issued.items():
        waited_at_once = [event for event in events if (event.rank, event.call_index) not in calls.hidden]
        allowed = max(0, len(events) - promised[rank][counting])
        exposed += waited_at_once[allowed:]
    if not exposed:
        most = max(of_rank.total() for of_rank in promised.values())
        return Finding(verdict=PASS, facts=(state_fact("hidden", most=most),))
    first = min(exposed, key=lambda event: (event.call_index, event.rank))
    count = sum(event.rank == first.rank for event in exposed)
    alone = state_fact(
        "exposed",
        count=count,
        promised=promised[first.rank].total(),
        rank=first.rank,
        call=str(key_of(first)),
        place=f"{first.phase} of {first.region or 'no module'}",
        caller=first.caller,
    )
    return Finding(
        verdict=FAIL,
        facts=(alone,),
        ranks=tuple(sorted({event.rank for event in exposed})),
        phase=first.phase,
        region=first.region,
    )


def check_parallelism(run: RecordedRun, claims: Claims) -> Finding | None:
    """Whether the case really ran in parallel: every rank communicated, and ranks hold less than the full tensors.

    Without this check a split that splits nothing would pass, with every number right (ColossalAI #5903).
    """
    split = split_axes(run.case)
    mesh = " x ".join(f"{axis}={size}" for axis, size in split.items())
    if not split or not (run.calls.events or any(run.outcomes)):  # nothing was returned: coverage says so
        return None
    talked = {event.rank for event in run.calls.events if event.group_size > 1 and event.op != "barrier"}
    silent = tuple(rank for rank in range(len(run.outcomes)) if rank not in talked)
    terms = claims.expectation
    silence_expected = terms is not None and all(term.group_size == 1 or term.calls == 0 for term in terms)
    if silent and not silence_expected:
        silent = silent if talked else ()
        return Finding(verdict=FAIL, facts=(state_fact("silent", ranks=silent, mesh=mesh),), ranks=silent)
    sharded = _find_sharded_names(run.outcomes)
    talk = state_fact("ranks_talk", talking=len(talked), ranks=len(run.outcomes), mesh=mesh)
    share = split_share(run.outcomes)
    notes = (Note(kind=NoteKind.SPLIT_SHARE, numbers=(share,)),) if share else ()
    if ("wp" if "wp" in run.case.axes else "tp") not in split:  # next to wp, tp splits the sequence and no parameters
        return Finding(verdict=PASS, facts=(talk, state_fact("no_split_weights")), notes=notes)
    if not sharded:
        return Finding(
            verdict=PASS, facts=(talk,), notes=note_unchecked("local shapes: every tensor was returned in full")
        )
    if not any(sharded.values()):
        whole = state_fact("shards_whole", shards=len(sharded), mesh=mesh)
        return Finding(verdict=FAIL, facts=(whole,), names=tuple(sharded))
    smaller = state_fact("shards_smaller", smaller=sum(sharded.values()), shards=len(sharded))
    return Finding(verdict=PASS, facts=(talk, smaller), notes=notes)


def split_share(outcomes: Outcomes) -> int | None:
    """Percentage of parameter elements in tensors that some rank does not hold in full, rounded down but not to 0.

    Parameters are those returned as param/, else as grad/; None if none of them is returned as a part.
    """
    for kind in ("param/", "grad/"):
        names = dict.fromkeys(name for outcome in outcomes for name in outcome if name.startswith(kind))
        blocks = {name: [list(outcome.get(name, ())) for outcome in outcomes] for name in names}
        shapes = {name: part.global_shape for name, ranks in blocks.items() for parts in ranks for part in parts}
        if shapes:
            whole = all(part.whole for ranks in blocks.values() for parts in ranks for part in parts)
            sizes = {name: math.prod(shape) for name, shape in shapes.items()}
            least = {name: min(sum(part.local.numel() for part in parts) for parts in blocks[name]) for name in shapes}
            split = [name for name in shapes if least[name] < sizes[name]]
            share = sum(sizes[name] for name in split) / max(1, sum(sizes.values()))
            return None if whole else max(int(100 * share), int(bool(split)))
    return None


def _find_sharded_names(outcomes: Outcomes) -> dict[str, bool]:
    """Names returned as shards -> whether some rank holds only a part of the full tensor, or nothing."""
    shapes = {
        name: parts[0].global_shape
        for outcome in outcomes
        for name, parts in outcome.items()
        if parts and not all(part.whole for part in parts)
    }
    return {
        name: any(sum(part.local.numel() for part in rank.get(name, ())) < math.prod(shape) for rank in outcomes)
        for name, shape in shapes.items()
    }
