"""Compares runs of one case bit for bit: whether they repeat, whether recording disturbs them, and whether documents
that share a row influence each other.
"""

import math
from itertools import zip_longest

from shardproof.harness.checking.finding import Finding, apart_by
from shardproof.harness.checking.measures.spreads import run_spreads
from shardproof.harness.checking.records import Documents, RecordedRun, Repeats
from shardproof.harness.outcome.merging import Outcomes, same_bits, state_differences
from shardproof.harness.verdicts.facts import Fact, note_unchecked, state_fact
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN


def check_determinism(run: RecordedRun, repeats: Repeats) -> Finding:
    """Whether two runs of the case give the same bits on every rank.

    If the recorded run differs from an unrecorded one, two unrecorded runs decide between this check and `recording`.
    """
    return _compare_repeats(run, repeats, blame_recording=False)


def check_recording(run: RecordedRun, repeats: Repeats) -> Finding:
    """Whether the recorded run gives the same bits as an unrecorded one."""
    return _compare_repeats(run, repeats, blame_recording=True)


def check_documents(documents: Documents) -> Finding:
    """Whether documents that share a row, a step or ranks are computed as if each were alone.

    No document changes another one, and no gradient of one reaches tokens of another. Both are exact, since a document
    that is not read adds nothing at all. Runs of one step show this (harness.running.trials.document_runs), so the
    check needs no dense model, and applies to a dense model as well.
    """
    if documents.problem:
        return Finding(verdict=UNKNOWN, facts=(state_fact("documents_unknown", problem=documents.problem),))
    if documents.count < 2:
        return Finding(verdict=UNKNOWN, facts=(state_fact("one_document"),))
    leak = documents.leak
    if leak is None:
        return Finding(verdict=PASS, facts=(state_fact("documents_apart", documents=documents.count),))
    values = {name: getattr(leak, name) for name in ("of", "other", "token", "rank", "gap", "before", "place")}
    fact = state_fact("document_leak_forward" if leak.phase == "forward" else "document_leak_backward", **values)
    if leak.rounding:
        facts, notes = (fact, state_fact("leak_as_rounding")), note_unchecked("borders of documents")
        return Finding(verdict=UNKNOWN, facts=facts, notes=notes)
    return Finding(verdict=FAIL, facts=(fact,), ranks=(leak.rank,), phase=leak.phase)


def _compare_repeats(run: RecordedRun, repeats: Repeats, *, blame_recording: bool) -> Finding:
    if repeats.problem:
        return Finding(verdict=UNKNOWN, facts=(state_fact("run_not_ended", words="", problem=repeats.problem),))
    plain, *again = repeats.runs
    difference = _first_difference(run.outcomes, plain)
    steady = bool(again) and all(_first_difference(plain, other) is None for other in again)
    if difference is None or steady != blame_recording:
        agree = "recording_right" if blame_recording else "runs_agree"
        return Finding(verdict=PASS, facts=(state_fact(agree, runs=1 + len(repeats.runs)),))
    name, rank, how = difference
    spreads = run_spreads(run.outcomes, plain)
    furthest = max(spreads, key=spreads.__getitem__, default=name)
    name, rank, how = _first_difference(*(_of_name(each, furthest) for each in (run.outcomes, plain))) or difference
    return Finding(
        verdict=FAIL,
        facts=(state_fact("recording_differs" if blame_recording else "runs_differ", name=name, rank=rank, how=how),),
        worst=apart_by(run.dtype_of(name), name, spreads.get(name, math.inf)),
        names=(name,),
        ranks=(rank,),
    )


def _of_name(outcomes: Outcomes, name: str) -> Outcomes:
    """The ranks' outcomes of one name alone."""
    return [{name: outcome[name]} if name in outcome else {} for outcome in outcomes]


def same_outcomes(first: Outcomes, second: Outcomes) -> bool:
    """Whether two runs returned the same bits under the same names on every rank."""
    return _first_difference(first, second) is None


def _first_difference(first: Outcomes, second: Outcomes) -> tuple[str, int, Fact] | None:
    """Name, rank and kind of the first value in which two runs differ."""
    for rank, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        for name in dict.fromkeys([*mine, *theirs]):
            if name not in mine or name not in theirs:
                return name, rank, state_fact("returned_once")
            for a, b in zip_longest(mine[name], theirs[name]):
                if a is None or b is None or a.offsets != b.offsets:
                    return name, rank, state_fact("moved_blocks")
                if not same_bits(a.local, b.local):
                    return name, rank, state_differences(a.local, b.local)
    return None
