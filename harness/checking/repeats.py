"""Checks of runs of one case against each other, bit for bit: whether they repeat, whether recording disturbs, and
whether documents that share a row leave each other alone.
"""

import math
from itertools import zip_longest

from shardproof.harness.checking.finding import Finding, apart_by
from shardproof.harness.checking.measures.spreads import run_spreads
from shardproof.harness.checking.records import DocumentLeak, Documents, Repeats, Run
from shardproof.harness.outcome.merging import Outcomes, describe_differences, same_bits
from shardproof.harness.verdicts.facts import note_unchecked
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN


def check_determinism(run: Run, repeats: Repeats) -> Finding:
    """Whether two runs of the case give the same bits on every rank.

    When the recorded run differs from an unrecorded one, two unrecorded runs decide between this check and `recording`.
    """
    return _compare_repeats(run, repeats, blame_recording=False, praise="runs agree in every bit")


def check_recording(run: Run, repeats: Repeats) -> Finding:
    """Whether the recorded run gives the same bits as an unrecorded one."""
    return _compare_repeats(run, repeats, blame_recording=True, praise="recording changes no bit")


def check_documents(documents: Documents) -> Finding:
    """Whether documents that share a row, a step or ranks are computed as if each were alone.

    No document changes another one, and no gradient of one reaches another one's tokens.

    Both are exact: a document that is not read adds nothing at all. Runs of one step tell it
    (harness.running.trials.document_runs). So it needs no dense model, and it notices what a dense model does too.
    """
    if documents.problem:
        return Finding(verdict=UNKNOWN, message=f"documents could not be told apart: {documents.problem}")
    if documents.count < 2:
        message = "the step has one document, so nothing can cross a border; legal: rows of several documents"
        return Finding(verdict=UNKNOWN, message=message)
    leak = documents.leak
    if leak is None:
        message = f"{documents.count} documents: none changes another one, and no gradient crosses a border"
        return Finding(verdict=PASS, message=message)
    if leak.rounding:
        reason = "a number of rows that changes with what they hold can round otherwise"
        message = f"{_describe_leak(leak)}, as little as rounding may change it: {reason}"
        return Finding(verdict=UNKNOWN, message=message, notes=note_unchecked("borders of documents"))
    return Finding(verdict=FAIL, message=_describe_leak(leak), ranks=(leak.rank,), phase=leak.phase)


def _describe_leak(leak: DocumentLeak) -> str:
    """Which document reaches which, and between which lines of the subject."""
    where = f"between {leak.before} and {leak.place}" if leak.before else f"at {leak.place}"
    token = f"token {leak.token} on rank {leak.rank}"
    if leak.phase == "forward":
        return f"document {leak.of} changes document {leak.other}: {token} changes by {leak.gap:.3g} {where}"
    found = f"{token} gets {leak.gap:.3g} more of it {where}"
    return f"the gradient of document {leak.of} reaches document {leak.other}: {found}"


def _compare_repeats(run: Run, repeats: Repeats, *, blame_recording: bool, praise: str) -> Finding:
    plain, *again = repeats.runs
    difference = _first_difference(run.outcomes, plain)
    steady = bool(again) and all(_first_difference(plain, other) is None for other in again)
    if difference is None or steady != blame_recording:
        return Finding(verdict=PASS, message=f"{1 + len(repeats.runs)} runs: {praise}")
    name, rank, how = difference
    who = "the recorded run and an unrecorded one" if blame_recording else "two runs of the same case"
    spreads = run_spreads(run.outcomes, plain)
    furthest = max(spreads, key=spreads.__getitem__, default=name)
    name, rank, how = _first_difference(*(_of_name(each, furthest) for each in (run.outcomes, plain))) or difference
    return Finding(
        verdict=FAIL,
        message=f"{name} on rank {rank} differs between {who}: {how}",
        worst=apart_by(run.dtype_of(name), name, spreads.get(name, math.inf)),
        names=(name,),
        ranks=(rank,),
    )


def _of_name(outcomes: Outcomes, name: str) -> Outcomes:
    """The ranks' outcomes under one name alone."""
    return [{name: outcome[name]} if name in outcome else {} for outcome in outcomes]


def same_outcomes(first: Outcomes, second: Outcomes) -> bool:
    """Whether two runs returned the same bits under the same names on every rank."""
    return _first_difference(first, second) is None


def _first_difference(first: Outcomes, second: Outcomes) -> tuple[str, int, str] | None:
    """Name, rank and words of the first value that two runs do not share."""
    for rank, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        for name in dict.fromkeys([*mine, *theirs]):
            if name not in mine or name not in theirs:
                return name, rank, "only one of the runs returned it"
            for a, b in zip_longest(mine[name], theirs[name]):
                if a is None or b is None or a.offsets != b.offsets:
                    return name, rank, "its blocks lie in other places"
                if not same_bits(a.local, b.local):
                    return name, rank, describe_differences(a.local, b.local)
    return None
