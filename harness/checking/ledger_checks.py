"""The check of the ledger: every rank issued exactly the events of the closed form, and the general laws hold."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.laws import Broken, broken_laws
from shardproof.harness.checking.records import Calls, Claims, Truth
from shardproof.harness.differences import find_differences
from shardproof.harness.ledger import NO_UPDATE, OTHER, Event, name_unmapped_operators
from shardproof.harness.protocols import TermLike
from shardproof.harness.terms import FIELDS, Term, as_stated, closed_forms, select_unseen_terms, select_visible_terms
from shardproof.harness.verdicts.facts import Note, NoteKind, Worst, note_unchecked, state_difference, state_fact
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN

if TYPE_CHECKING:
    from shardproof.harness.differences import Difference


def check_ledger(calls: Calls, claims: Claims, truth: Truth | None = None) -> Finding | None:
    """Whether every rank issued exactly the expected events; without an expectation, whether the general laws hold."""
    if calls.case.world_size == 1 and claims.expectation:  # the group of a single rank has no axis's name
        terms = (replace(term, axis=None) if isinstance(term, Term) else term for term in claims.expectation)
        claims = replace(claims, expectation=tuple(terms))
    finding = _compare_ledger(calls, claims, truth)
    if finding is None or finding.verdict != FAIL:
        return finding
    return replace(finding, notes=(*finding.notes, *_note_doubts(calls)))


def _compare_ledger(calls: Calls, claims: Claims, truth: Truth | None) -> Finding | None:
    if names := name_unmapped_operators(calls.events):
        return _find_unmapped_operators(names, [event for event in calls.events if event.op == OTHER])
    world_size, ranks = calls.case.world_size, calls.ranks
    known = () if calls.ran else calls.events  # the laws are about all members of a group
    if claims.expectation is None:
        if broken := broken_laws(known):
            return report_broken_law(broken[0])
        if not calls.events and world_size > 1:
            return None
        nothing = Note(kind=NoteKind.CLOSED_FORM, reason="the subject states no expectation")
        lawful = state_fact("lawful", events=len(calls.events))
        return Finding(verdict=PASS, facts=(lawful,), notes=(nothing, *_note_doubts(calls)))
    if not as_stated(calls.events, select_visible_terms(claims.expectation), ranks, claims.axes):
        order = module_order(calls, claims, truth)
        if parted := find_differences(calls.events, claims.expectation, ranks, order, axes=claims.axes):
            return _report_difference(parted, len(ranks))
    finding = _compare_expected_terms(calls, claims, claims.expectation)
    broken = broken_laws(known)
    return report_broken_law(broken[0]) if broken else finding


def _compare_expected_terms(calls: Calls, claims: Claims, terms: Sequence[TermLike]) -> Finding:
    """The finding on a ledger that agrees with these terms. What the terms leave out is unchecked."""
    forms = closed_forms(select_visible_terms(terms), calls.ranks, claims.axes).values()
    partial = [term for form in forms for term in form.partial]
    if not partial:
        least, most = (pick(form.complete.total() for form in forms) for pick in (min, max))
        exact = state_fact("calls_as_expected", least=least, most=most)
        return Finding(verdict=PASS, facts=(exact,), notes=(*_note_carried_calls(terms), *_note_doubts(calls)))
    left_out = [name for name in (*FIELDS, "calls") if any(name in term.left_out for term in partial)]
    most = max(Counter(event.rank for event in calls.events).values(), default=0)
    return Finding(
        verdict=PASS,
        facts=(state_fact("calls_as_stated", most=most),),
        notes=(
            Note(kind=NoteKind.CLOSED_FORM, names=tuple(left_out), reason="fields that its terms leave out"),
            *_note_carried_calls(terms),
            *_note_doubts(calls),
        ),
    )


def _note_carried_calls(terms: Sequence[TermLike]) -> tuple[Note, ...]:
    """The expected calls that the recorder cannot see, by the carrier that carries them out."""
    calls: dict[tuple[str, str], list[int | None]] = defaultdict(list)
    for term in select_unseen_terms(terms):
        calls[term.carrier, f"{term.op or 'call'} over {term.axis or 'any axis'}"].append(term.calls)
    return note_unchecked(
        *(
            f"{'any number of' if None in numbers else sum(filter(None, numbers))} {what}, expected and carried by "
            f"{carrier}, which no recorder sees"
            for (carrier, what), numbers in sorted(calls.items())
        )
    )


def _note_doubts(calls: Calls) -> tuple[Note, ...]:
    """Doubts of the recorder. In a run of one step, the number of the step is not in doubt."""
    doubts = dict.fromkeys(doubt for event in calls.events for doubt in event.doubts)
    known = sorted(doubt for doubt in doubts if doubt != NO_UPDATE or calls.case.steps > 1)
    return tuple(Note(kind=NoteKind.DOUBT, reason=doubt) for doubt in known)


def report_broken_law(first: Broken) -> Finding:
    """The finding on a run that breaks this law."""
    return Finding(
        verdict=FAIL, facts=(first.fact,), kind="law", ranks=first.ranks, phase=first.phase, region=first.region
    )


def _find_unmapped_operators(names: str, events: Sequence[Event]) -> Finding:
    """The finding on a run with operators of torch that this version does not know."""
    first = events[0]
    return Finding(
        verdict=UNKNOWN,
        facts=(state_fact("unmapped", operators=names, calls=len(events), caller=first.caller or "no user line"),),
        notes=note_unchecked("the ledger"),
        phase=first.phase,
        region=first.region,
    )


def _report_difference(parted: "Sequence[Difference]", ranks_run: int) -> Finding:
    first = parted[0]
    more = (state_fact("more_lines", count=len(parted) - 1),) if len(parted) > 1 else ()
    ranks = () if len(first.ranks) == ranks_run else first.ranks
    calls = sum(difference.calls for difference in parted)
    return Finding(
        verdict=FAIL,
        facts=(state_difference(first), *more),
        kind="counted" if first.counted else first.kind,
        worst=Worst(name=f"{first.kind} {first.line.op}".strip(), error=float(calls), allowed=0.0, epsilons=0.0)
        if calls
        else None,
        ranks=ranks,
        phase=first.line.phase,
        region=first.line.region,
    )


def module_order(calls: Calls, claims: Claims, truth: Truth | None) -> tuple[str, ...]:
    """Modules in the order of forward: those of the truth's activations, then those that ledger or terms add."""
    known = truth.tensors if truth else ()
    from_truth = [name.removeprefix("act/") for name in known if name.startswith("act/")]
    from_ledger = [event.region for event in calls.events if event.phase == "forward"]
    from_terms = [term.region for term in claims.expectation or () if term.phase == "forward" and term.region]
    return tuple(dict.fromkeys([*(from_truth or from_ledger), *from_ledger, *from_terms]))
