"""The diagnosis of a failed check: what is wrong and where, the first place where it went wrong, and likely causes.

The first place is `harness.diagnosing.first_place`'s, the causes are `harness.diagnosing.rank_causes`'s; how it is
reported is `harness.diagnosing.six_lines`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.checking.evidence import FAIL, Evidence, Finding
from harness.checking.ledger_checks import module_order
from harness.checking.measures.kinds import kind_of
from harness.diagnosing.causes.cause import Cause, reported
from harness.diagnosing.causes.hypothesis import Failure
from harness.diagnosing.causes.places import comparable, place_of, timeline, wrong_ranks
from harness.diagnosing.first_place import First, first_place
from harness.diagnosing.hints import hint
from harness.diagnosing.rank_causes import likely
from harness.differences import Difference, but_for_bytes, differences
from harness.errors import Desynchronised, ProgramError, RankCrashed, ShardproofError, Stalled


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Common part of all failed checks of a case: the first place where it went wrong, and what is likely behind it.

    `hint` is what else is known where no cause fits.
    """

    first: First
    causes: tuple[Cause, ...]
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Explanation):
    """A failed check explained. `name` is the tensor or event in question; `ranks` are empty for all or unknown ranks.

    `step` is -1 when it is unknown.
    """

    check: str
    name: str = ""
    ranks: tuple[int, ...] = ()
    step: int = -1
    phase: str = ""
    region: str = ""


def explanation_of(evidence: Evidence, findings: Mapping[str, Finding]) -> Explanation:
    """Where a case with failed checks first went wrong, and why."""
    names = {name for finding in findings.values() if finding.verdict == FAIL for name in finding.names}
    known = [*evidence.truth, *sorted(names - set(evidence.truth))]
    wrong = [name for name in timeline(known, evidence.case.steps) if name in names]
    ledger_failed = "ledger" in findings and findings["ledger"].verdict == FAIL
    parted = _first_difference(evidence, wrong) if ledger_failed else None
    first = first_place(evidence, wrong, parted)
    call_first = parted is not None and first.step < 0
    numbers = [name for name in wrong if name in evidence.truth and comparable(evidence, name)]
    failure = Failure(
        evidence=evidence, wrong=wrong, numbers=numbers, findings=findings, parted=parted, call_first=call_first
    )
    causes = likely(failure)
    return Explanation(first=first, causes=causes, hint="" if causes else hint(evidence, first, wrong))


def diagnose(
    evidence: Evidence, findings: Mapping[str, Finding], check: str, known: Explanation | None = None
) -> Diagnosis:
    """Diagnose a failed check, in the light of all findings of its case; `known` is what they share."""
    finding = findings[check]
    name = finding.worst.name if finding.wrong and finding.worst else next(iter(finding.names), "")
    place = place_of(name, evidence.case.steps) if name else None
    shared = known or explanation_of(evidence, findings)
    first = shared.first
    return Diagnosis(
        check=check,
        name=name or (finding.worst.name if finding.worst else ""),
        ranks=finding.ranks or wrong_ranks(evidence, name),
        step=place.step if place else -1,
        phase=finding.phase or (place.phase if place else ""),
        region=finding.region or (place.module if place else ""),
        first=first if first.phase or first.event else First(phase=finding.phase, region=finding.region),
        causes=shared.causes,
        hint=shared.hint,
    )


def ended(error: ShardproofError) -> Diagnosis:
    """Diagnose a case that ended without an outcome."""
    if isinstance(error, Desynchronised):
        known = "desynchronised"
        words = "the ranks issued different calls, or not as many: the line above says where each stood"
    elif isinstance(error, RankCrashed):
        known, words = "crashed", "the subject ended the process of a rank: a crash in native code, or os._exit"
    elif isinstance(error, Stalled):
        known = "stalled"
        words = "a rank loops, sleeps or is stopped at the line above, or needs more time for what it does there"
    elif isinstance(error, ProgramError):
        known, words = "raised", "the subject raised: the line above says where each rank stood"
    else:
        known, words = "machine", "a rank that waits for ever, too little time, or a machine that failed"
    ranks, causes = tuple(getattr(error, "ranks", ())), (reported(known, words, error),)
    return Diagnosis(check="run", ranks=ranks, first=First(), causes=causes)


def _first_difference(evidence: Evidence, wrong: Sequence[str]) -> Difference | None:
    """The first difference of the ledger; where numbers are wrong, but for other payloads in modules of experts.

    A choice of experts, which follows from numbers, decides how many rows their calls have.
    """
    if evidence.expectation is None:
        return None
    parted = differences(
        evidence.events, evidence.expectation, evidence.ranks, module_order(evidence), axes=evidence.axes
    )
    chosen = [name for name in evidence.returned if wrong and kind_of(name) == "routing"]
    choices = {place_of(name, evidence.case.steps).module for name in chosen}
    return next(iter(but_for_bytes(parted, choices)), None)
