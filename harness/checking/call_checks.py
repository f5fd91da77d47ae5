"""Checks of how ranks talk: over the ranks of an axis, waited for, hidden as promised, and in parallel at all."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.laws import group_events, same_sequence
from shardproof.harness.checking.ledger_checks import report_broken_law
from shardproof.harness.checking.records import Calls, Claims, DryRun, Run
from shardproof.harness.errors import ranks_text
from shardproof.harness.ledger import Event
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.outcome.merging import Outcomes
from shardproof.harness.protocols import Axes
from shardproof.harness.terms import EventKey, Term, closed_forms, key_of, select_visible_terms
from shardproof.harness.verdicts.facts import Note, NoteKind, note_unchecked
from shardproof.harness.verdicts.verdict import FAIL, PASS


def check_groups(calls: Calls, claims: Claims) -> Finding | None:
    """Whether the group of every event is a rank list of its axis.

    The axis of an event is the name that the program gave its group ("wp", DeviceMesh's "mesh_wp"). The ledger compares
    names, so a group of this name over other ranks agrees with the closed form. When the same is done everywhere it
    agrees with every number too. The rank lists of an axis are the case's, or those of `subject.axes(case)` for another
    rank order. The axis "dp_cp" joins those two: its groups are the connected components of their rank lists. The order
    within a group is not compared: torch sorts the ranks of every group.
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
        named = ", ".join(sorted(axes - unnamed)) or "no axis"
        message = f"every group named {named} is a rank list of its axis"
        return Finding(verdict=PASS, message=message, notes=notes)
    first = stray[0]
    axis, ran = first.axis, [event.group for event in stray if event.axis == first.axis]
    rule = f"are no rank lists of axis {axis}: {lists_text(_legal_groups(claims.axes, axes)[axis])}"
    legal = "the groups of these ranks, or subject.axes(case) that states another rank order"
    return Finding(
        verdict=FAIL,
        message=f"{len(ran)} calls named {axis} run over the ranks {lists_text(ran)}, which {rule}; legal: {legal}",
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
    """The rank lists of every axis of the case and of those of these names that join some, such as "dp_cp"."""
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


def lists_text(lists: Iterable[Sequence[int]]) -> str:
    """Rank lists as messages print them, each once and at most four: "[0, 1] [2, 3]"."""
    texts = sorted({str(sorted(ranks)) for ranks in lists})
    return " ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def check_order(calls: Calls, dry: DryRun) -> Finding:
    """Whether ranks that share a group issue the same calls in it in the same order, and which ranks are alike.

    Ranks that compute numbers end in an error of the engine where they do not.
    """
    if broken := same_sequence(group_events(calls.events), calls.ran):
        return report_broken_law(broken[0])
    sequences: dict[tuple[str, ...], list[int]] = {}
    ordered = sorted(calls.events, key=attrgetter("rank", "call_index"))
    for rank, events in itertools.groupby(ordered, key=attrgetter("rank")):
        sequences.setdefault(tuple(str(key_of(event)) for event in events), []).append(rank)
    alike = list(sequences.values()) or [list(calls.ran)]
    classes = " | ".join(map(ranks_text, alike))
    ran = f"{len(calls.ran)} of {calls.case.world_size} ranks run"
    message = f"{ran}, in {len(alike)} class(es) of equal sequences: {classes}; {dry.memory}"
    return Finding(verdict=PASS, message=message, notes=dry.notes)


def check_waits(calls: Calls) -> Finding | None:
    """Whether every asynchronous call was waited for: one that never was may be used before it is complete.

    The result of a functional collective waits when it is read, so one that was never waited for was never read.
    """
    if not calls.unwaited:
        started = sum(event.is_async for event in calls.events)
        message = f"all {started} asynchronous calls were waited for before their results were read"
        return Finding(verdict=PASS, message=message) if started else None
    first = calls.unwaited[0]
    more = f"; {len(calls.unwaited) - 1} more like it" if len(calls.unwaited) > 1 else ""
    message = f"{first.op} #{first.number} of {first.group} at {first.caller} was never waited for{more}"
    ranks = tuple(sorted({work.rank for work in calls.unwaited}))
    return Finding(verdict=FAIL, message=message, kind=f"{first.op} not waited for", ranks=ranks)


def check_overlap(calls: Calls, claims: Claims) -> Finding | None:
    """Whether as many calls as promised are hidden on every rank; a missing call is reported by the ledger check.

    A term with `hidden=True` promises that each of its calls is asynchronous and that a product is computed between its
    issue and its first wait. A term without it promises nothing. Hidden calls are measured in the recorded run
    (harness.recording.measures), in a dry run by its meter. The meter knows the order of the program, and no time.
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
        return Finding(verdict=PASS, message=f"{most} calls a rank travel behind products, as promised")
    first = min(exposed, key=lambda event: (event.call_index, event.rank))
    count = sum(event.rank == first.rank for event in exposed)
    where = f"{first.phase} of {first.region or 'no module'} at {first.caller}"
    message = (
        f"{count} of {promised[first.rank].total()} calls of rank {first.rank} that should travel behind a product "
        f"do not: the first is {key_of(first)} in {where}, with no product between its issue and its wait"
    )
    return Finding(
        verdict=FAIL,
        message=message,
        ranks=tuple(sorted({event.rank for event in exposed})),
        phase=first.phase,
        region=first.region,
    )


def check_parallelism(run: Run, claims: Claims) -> Finding | None:
    """Whether the case really ran in parallel: every rank talked, and ranks hold less than the full tensors.

    Guards against a split that splits nothing: every number is right then, and nothing is parallel (ColossalAI #5903).
    """
    split = split_axes(run.case)
    mesh = " x ".join(f"{axis}={size}" for axis, size in split.items())
    if not split or not (run.calls.events or any(run.outcomes)):  # nothing at all came: coverage says so
        return None
    talked = {event.rank for event in run.calls.events if event.group_size > 1 and event.op != "barrier"}
    silent = tuple(rank for rank in range(len(run.outcomes)) if rank not in talked)
    terms = claims.expectation
    silence_expected = terms is not None and all(term.group_size == 1 or term.calls == 0 for term in terms)
    if silent and not silence_expected:
        whom = "no rank" if not talked else f"not rank {', '.join(map(str, silent))}"
        message = f"{whom} sent or received anything in a mesh of {mesh}"
        return Finding(verdict=FAIL, message=message, ranks=silent if talked else ())
    sharded = _find_sharded_names(run.outcomes)
    whole = f"{len(talked)} of {len(run.outcomes)} ranks talk over {mesh}"
    share = split_share(run.outcomes)
    notes = (Note(kind=NoteKind.SPLIT_SHARE, numbers=(share,)),) if share else ()
    if ("wp" if "wp" in run.case.axes else "tp") not in split:  # beside wp, tp splits the sequence alone
        return Finding(verdict=PASS, message=f"{whole}; no axis of it splits weights", notes=notes)
    if not sharded:
        return Finding(
            verdict=PASS, message=whole, notes=note_unchecked("local shapes: every tensor was returned in full")
        )
    if not any(sharded.values()):
        message = f"every rank holds the full tensor of all {len(sharded)} shards in a mesh of {mesh}"
        return Finding(verdict=FAIL, message=message, names=tuple(sharded))
    smaller = sum(sharded.values())
    words = f"{smaller} of {len(sharded)} sharded tensors are smaller on a rank"
    return Finding(verdict=PASS, message=f"{whole}; {words}", notes=notes)


def split_share(outcomes: Outcomes) -> int | None:
    """Percentage of parameter elements in tensors that some rank does not hold in full, rounded down but not to 0.

    Parameters are those returned as param/, else as grad/; None where none of them is returned as a part.
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
    """Names returned as shards -> whether every rank holds less than the full tensor."""
    smaller: dict[str, bool] = {}
    for outcome in outcomes:
        for name, parts in outcome.items():
            if parts and not all(part.whole for part in parts):
                less = sum(part.local.numel() for part in parts) < math.prod(parts[0].global_shape)
                smaller[name] = smaller.get(name, True) and less
    return smaller
