"""A disagreement of witnesses, explained like every failed check (`explained`), and its likely cause.

The cause follows from who contradicts whom. The recorder of the session is the same code as that of the proof, and nsys
stores what the recorder draws. The torch profiler and the closed form are independent of each other.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.witness_checks import CHECK
from shardproof.harness.diagnosing.causes.cause import Cause, report_cause
from shardproof.harness.diagnosing.diagnosis import Diagnosis
from shardproof.harness.diagnosing.explained import likely_causes, place_of_failure, repeat_command
from shardproof.harness.protocols import CaseLike
from shardproof.harness.verdicts.facts import FailedCheck, First, state_fact
from shardproof.harness.witnesses.agreement import AGREES, CLOSED_FORM, NOT_ASKED, Agreement, Row


def diagnose_disagreement(
    case: CaseLike, agreed: Agreement, finding: Finding, disturbed: Sequence[int] = ()
) -> Diagnosis:
    """A failed finding explained; `disturbed` are the ranks whose outcome changed when they were watched."""
    broken = () if disturbed else agreed.broken
    first = broken[0].recorded if broken else None
    step = first.step if first else -1
    return Diagnosis(
        check=CHECK,
        name=f"event {broken[0].index} of rank {broken[0].rank}" if broken else "",
        ranks=finding.ranks,
        step=step,
        phase=finding.phase,
        region=finding.region,
        first=First(phase=finding.phase, region=finding.region, step=step),
        causes=(_cause_of_disagreement(case, broken, disturbed=bool(disturbed)),),
    )


def failed_witnesses(
    diagnosis: Diagnosis, agreed: Agreement, case: CaseLike, subject: str, options: str
) -> FailedCheck:
    """The record of a failed finding."""
    differing = len(agreed.broken) if diagnosis.name else 0
    return FailedCheck(
        where=place_of_failure(diagnosis, case),
        repeat=repeat_command(case, subject, options),
        first=replace(diagnosis.first, name=diagnosis.name),
        causes=likely_causes(diagnosis),
        events=(differing, len(agreed.rows)),
    )


def _cause_of_disagreement(case: CaseLike, broken: Sequence[Row], *, disturbed: bool) -> Cause:
    if disturbed:
        return report_cause("stated", state_fact("watched_outcome"), disturbed)
    if not broken:
        return report_cause("stated", state_fact("no_collective", ranks=case.world_size), case)
    against, confirming = _split_sides(broken)
    if "recorder" in against:
        return report_cause("witness", state_fact("other_calls"), broken)
    if {"torch", CLOSED_FORM} <= against or (broken[0].recorded is None and "torch" in against):
        return report_cause("witness", state_fact("unlike_recorder", witnesses=sorted(against)), broken)
    if CLOSED_FORM in against:
        saw = state_fact("unlike_closed_form", witnesses=sorted({"recorder", *confirming}))
        return report_cause("witness", saw, broken)
    return report_cause("witness", state_fact("alone_otherwise", witnesses=sorted(against)), broken)


def _split_sides(broken: Sequence[Row]) -> tuple[set[str], set[str]]:
    """Witnesses that contradict the ledger in the first event, and those that confirm it.

    An event that one witness alone saw has a row of its own.
    """
    first = broken[0]
    if first.recorded is None:
        alike = [row for row in broken if row.recorded is None]
        return {witness for row in alike for witness in row.words}, set()
    against = {witness for witness, word in first.words.items() if word not in (AGREES, NOT_ASKED)}
    return against, {witness for witness, word in first.words.items() if word == AGREES}
