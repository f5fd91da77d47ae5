"""Checks before any number is compared: what was returned at all, how shards merge, replicas."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from shardproof.harness.checking.finding import Finding, apart_by
from shardproof.harness.checking.measures.kinds import kind_of, never_made
from shardproof.harness.checking.measures.spreads import replica_spread
from shardproof.harness.checking.records import Claims, RecordedRun, Truth
from shardproof.harness.outcome.merging import Flaw
from shardproof.harness.verdicts.facts import Fact, Note, NoteKind, notes_about, state_fact
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN

ROUTING = "routing"
"""A kind of names that is checked without a truth too: copies are compared (harness.checking.routing_checks)."""


def check_coverage(run: RecordedRun, truth: Truth, claims: Claims) -> Finding:
    """Whether there is anything to compare, and what of the truth the subject did not return.

    If the subject never returns a kind of names ("grad", "logits"), that is only listed as unchecked. If it returns
    some names of a kind and lacks others, or has names that the truth lacks, the verdict is unknown; if it returns no
    name of the truth, it fails. `subject.unchecked` declares, as patterns, the names that are missing on purpose.
    """
    returned = run.returned
    comparable = [name for name in truth.tensors if name in returned]
    missing = [name for name in truth.tensors if name not in returned]
    declared = {name for name in missing if is_declared(name, claims.declared)}
    strange = tuple(sorted(returned - set(truth.tensors)))
    kinds = {kind_of(name) for name in returned}
    unreturned = Counter(kind_of(name) for name in missing if name not in truth.from_ranks)
    decided = {
        kind: (0, count) for kind, count in unreturned.items() if kind not in kinds
    }  # other checks count names of returned kinds
    if truth.unmergeable:
        notes = notes_about(undecided=tuple(sorted(returned)))
        return Finding(verdict=UNKNOWN, facts=(state_fact("unmergeable"),), notes=notes)
    undeclared = [name for name in missing if name not in declared]
    notes = notes_about(not_returned=tuple(undeclared), left_out=tuple(name for name in missing if name in declared))
    if not comparable:
        notes += notes_about(not_in_truth=strange)
        known = list(truth.tensors)[:3]
        nothing = state_fact("nothing_checkable", returned=strange, truth=len(truth.tensors), known=known)
        return Finding(verdict=FAIL, facts=(nothing,), notes=notes, names=strange, decided=decided)
    named = {name for outcome in run.outcomes for name in outcome}
    strange = tuple(name for name in strange if name in named)  # the subject may have modules that the truth lacks
    # If the truth has no choices of experts, copies of the ranks' choices are compared with each other.
    if not any(kind_of(name) == ROUTING for name in truth.tensors):
        strange = tuple(name for name in strange if kind_of(name) != ROUTING)
    made = never_made(truth.tensors, strange)  # the check of the update reports these
    strange = tuple(name for name in strange if name not in made)
    all_declared = all(is_declared(name, claims.declared) for name in truth.tensors)
    problems = [
        *([state_fact("declares_all", patterns=claims.declared)] if all_declared else ()),
        *(claims.known_differences.problems(truth.tensors) if claims.known_differences else ()),
        *_describe_gaps(undeclared, named),
    ]
    if strange:
        nearest = [_nearest_name(name, undeclared) for name in strange]
        problems.append(state_fact("unknown_names", names=strange, nearest=nearest))
    on_purpose = [state_fact("left_out", count=len(declared))] if declared else []
    given = state_fact("returned", returned=len(comparable), truth=len(truth.tensors))
    return Finding(
        verdict=UNKNOWN if problems else PASS,
        facts=(given, *on_purpose, *problems, *_idle_patterns(truth, claims)),
        notes=(
            *notes,
            *notes_about(not_in_truth=strange),
            *(Note(kind=NoteKind.UNREAD_ROWS, reason=rows) for rows in truth.unread),
        ),
        decided=decided,
    )


def is_declared(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of those that the subject leaves out on purpose."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _describe_gaps(missing: Sequence[str], named: set[str]) -> list[Fact]:
    """One fact for each kind of which the subject returned some names and not these."""
    kinds = {kind_of(name) for name in named}
    gaps = []
    for kind in dict.fromkeys(map(kind_of, missing)):
        gap = [name for name in missing if kind_of(name) == kind]
        if kind in kinds:
            gaps.append(state_fact("missing", names=gap, kind=kind))
    return gaps


def _idle_patterns(truth: Truth, claims: Claims) -> list[Fact]:
    """Patterns that the subject states and that match no name of the truth."""
    names = list(truth.tensors)
    patterns = [("unchecked", pattern) for pattern in claims.declared]
    patterns += [
        ("deviates", pattern) for pattern in (claims.known_differences.sentences if claims.known_differences else ())
    ]
    idle = [(word, pattern) for word, pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    return [
        state_fact("no_such_name", word=word, pattern=pattern, nearest=_nearest_name(pattern, names))
        for word, pattern in idle
    ]


def _nearest_name(name: str, names: Sequence[str]) -> str:
    return next(iter(get_close_matches(name, names, n=1, cutoff=0.5)), "")


def check_layout(run: RecordedRun) -> Finding | None:
    """Whether the blocks of every name make one full tensor of the truth's shape, without gaps (`merge`)."""
    flaws = [flaw for flaw in run.merged.flaws if flaw.kind != "replica conflict"]
    return _judge_flaws(run, flaws, "merged", "flawed")


def check_replicas(run: RecordedRun) -> Finding | None:
    """Whether everything that several ranks hold is the same on all of them, bit for bit; the check `routing` does this
    for choices of experts. The names whose replicas differ most come first.
    """
    conflicts = [flaw for flaw in run.merged.flaws if flaw.kind == "replica conflict"]
    conflicts = [flaw for flaw in conflicts if kind_of(flaw.name) != ROUTING]
    spreads = {flaw.name: replica_spread(run.full_outcomes, flaw.name) for flaw in conflicts}
    furthest = max(spreads.values(), default=0.0)
    conflicts.sort(key=lambda flaw: spreads[flaw.name] < furthest)  # those that differ most come first
    finding = _judge_flaws(run, conflicts, "equal_replicas", "unequal_replicas")
    if finding is None or not conflicts:
        return finding
    return replace(finding, worst=apart_by(run.dtype_of(conflicts[0].name), conflicts[0].name, furthest))


def _judge_flaws(run: RecordedRun, flaws: list[Flaw], without: str, with_some: str) -> Finding | None:
    """The finding on these flaws. `without` is the id of the fact if there are none, `with_some` otherwise."""
    names = run.returned
    if not names:
        return None
    mine = tuple(dict.fromkeys(flaw.name for flaw in flaws))
    other = tuple(dict.fromkeys(flaw.name for flaw in run.merged.flaws if flaw.name not in mine))
    if not flaws:
        whole = state_fact(without, count=len(names) - len(other))
        return Finding(verdict=PASS, facts=(whole,), notes=notes_about(flawed=other))
    first = flaws[0]
    return Finding(
        verdict=FAIL,
        facts=(state_fact(with_some, name=first.name, kind=first.kind, flaw=first.fact),),
        notes=notes_about(flawed=other),
        names=mine,
        ranks=first.ranks,
    )
