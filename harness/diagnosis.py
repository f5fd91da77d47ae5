"""The diagnosis of a failed check: what is wrong and where, the first place where it went wrong, and likely causes.

The first place is `harness.diagnosing.first`'s, the causes are `harness.diagnosing.likely`'s; how it is told is
`harness.diagnosing.six_lines`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.causes import Cause
from harness.checking.ledger_checks import Difference, differences, module_order
from harness.diagnosing.first import First, first_place
from harness.diagnosing.likely import likely
from harness.diagnosing.places import place_of, timeline, wrong_ranks
from harness.errors import Desynchronised, ProgramError, ShardproofError
from harness.evidence import FAIL, Evidence, Finding
from harness.protocols import CaseLike

__all__ = ["Diagnosis", "First", "case_text", "diagnose", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One failed check explained. `name` is the tensor or event in question, `ranks` are empty when it is all of them.

    `step` is -1 when nobody knows it.
    """

    check: str
    name: str
    ranks: tuple[int, ...]
    step: int
    phase: str
    region: str
    first: First
    causes: tuple[Cause, ...]


def case_text(case: CaseLike) -> str:
    """The case's one line; never empty, so that it can stand in a table and behind `shardproof run`."""
    return str(case) or f"mode={case.mode}"


def diagnose(evidence: Evidence, findings: Mapping[str, Finding], check: str) -> Diagnosis:
    """What is known of a failed check, in the light of all findings of its case."""
    finding = findings[check]
    name = finding.worst.name if finding.wrong and finding.worst else next(iter(finding.names), "")
    place = place_of(name, evidence.case.steps) if name else None
    wrong = _all_wrong(evidence, findings)
    parted = _first_difference(evidence) if findings.get("ledger", finding).verdict == FAIL else None
    return Diagnosis(
        check=check,
        name=name or (finding.worst.name if finding.worst else ""),
        ranks=finding.ranks or wrong_ranks(evidence, name),
        step=place.step if place else -1,
        phase=finding.phase or (place.phase if place else ""),
        region=finding.region or (place.module if place else ""),
        first=first_place(evidence, wrong, parted),
        causes=likely(evidence, check, parted, wrong, _telling(finding, wrong, name)),
    )


def ended(error: ShardproofError) -> Diagnosis:
    """What is known of a case that ended without an outcome."""
    if isinstance(error, Desynchronised):
        words = "the ranks issued different calls, or not as many: the line above says where each stood"
        cause = Cause(id="desynchronised", words=words)
    elif isinstance(error, ProgramError):
        cause = Cause(id="raised", words="the subject raised: the line above says where each rank stood")
    else:
        cause = Cause(id="machine", words="a rank that waits for ever, too little time, or a machine that failed")
    return Diagnosis(
        check="run",
        name="",
        ranks=tuple(getattr(error, "ranks", ())),
        step=-1,
        phase="",
        region="",
        first=First(),
        causes=(cause,),
    )


def _all_wrong(evidence: Evidence, findings: Mapping[str, Finding]) -> list[str]:
    """Every wrong name, in the order in which training computes."""
    wrong = {name for finding in findings.values() if finding.verdict == FAIL for name in finding.names}
    names = [*evidence.truth, *sorted(wrong - set(evidence.truth))]
    return [name for name in timeline(names, evidence.case.steps) if name in wrong]


def _telling(finding: Finding, wrong: Sequence[str], name: str) -> str:
    """The tensor of this check that tells most of causes: the first wrong one, for later ones are consequences."""
    mine = set(finding.names)
    return next((other for other in wrong if other in mine), name)


def _first_difference(evidence: Evidence) -> Difference | None:
    if evidence.expectation is None:
        return None
    parted = differences(evidence.events, evidence.expectation, evidence.ranks, module_order(evidence))
    return parted[0] if parted else None
