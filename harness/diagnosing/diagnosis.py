"""The diagnosis of a failed check: what is wrong and where, the first wrong place, and likely causes.

`harness.diagnosing.first_place` finds the place, `harness.diagnosing.rank_causes` the causes, and
`harness.diagnosing.explained` makes the record that is stored.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.laws import broken_laws
from shardproof.harness.checking.ledger_checks import module_order
from shardproof.harness.checking.measures.kinds import NUMERIC_KINDS, kind_of
from shardproof.harness.checking.measures.spreads import replica_spread
from shardproof.harness.checking.records import Evidence, RecordedRun, Truth
from shardproof.harness.diagnosing.causes.cause import Cause, report_cause
from shardproof.harness.diagnosing.causes.hypothesis import Failure
from shardproof.harness.diagnosing.causes.places import is_comparable, order_by_time, place_of, wrong_ranks
from shardproof.harness.diagnosing.causes.proofs import last_bits
from shardproof.harness.diagnosing.first_place import first_place
from shardproof.harness.diagnosing.hints import find_agreement
from shardproof.harness.diagnosing.rank_causes import likely_causes
from shardproof.harness.differences import Difference, but_for_bytes, find_differences
from shardproof.harness.errors import Desynchronised, ProgramError, RankCrashed, ShardproofError, Stalled, TimeLimit
from shardproof.harness.verdicts.facts import AgreementByKind, First, noted_names, state_fact
from shardproof.harness.verdicts.verdict import FAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What all failed checks of a case have in common: the first wrong place, and its likely causes.

    If there is no cause, `agreement` says what agrees with the truth.
    """

    first: First
    causes: tuple[Cause, ...]
    agreement: AgreementByKind = AgreementByKind()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Explanation):
    """A failed check explained. `name` is the tensor or event in question; `ranks` is empty for all or unknown ranks.

    `step` is -1 if it is unknown.
    """

    check: str
    name: str = ""
    ranks: tuple[int, ...] = ()
    step: int = -1
    phase: str = ""
    region: str = ""


BIT_FOR_BIT = ("replicas", "determinism", "recording")
"""Checks that allow no difference at all, not even one of rounding."""


def faults_of(run: RecordedRun, findings: Mapping[str, Finding]) -> list[Mapping[str, Finding]]:
    """The findings of each independent fault, one or two; the first one is explained first.

    If replicas or runs differ by rounding alone, that explains no error beyond a limit, so it is a fault by itself.
    """
    failed = {check: finding for check, finding in findings.items() if finding.verdict == FAIL}
    little = {
        name
        for check in BIT_FOR_BIT
        for name in (failed[check].names if check in failed else ())
        if _is_rounding(run, check, failed[check], name)
    }
    apart = [check for check in BIT_FOR_BIT if check in failed and {*failed[check].names} <= little]
    if not little or not any(finding.wrong for finding in failed.values()):
        return [findings]

    def but_for(finding: Finding) -> Finding:
        return replace(finding, names=tuple(name for name in finding.names if name not in little))

    gross = {check: finding for check, finding in findings.items() if check not in apart}
    gross |= {check: but_for(gross[check]) for check in BIT_FOR_BIT if check in gross}
    rest = {check: finding for check, finding in findings.items() if check in apart or check not in failed}
    return [gross, rest] if apart else [gross]


def _is_rounding(run: RecordedRun, check: str, finding: Finding, name: str) -> bool:
    """Whether replicas, or runs, of this name differ in their last bits only."""
    of_runs = finding.worst.error if finding.worst else math.inf
    spread = replica_spread(run.full_outcomes, name) if check == "replicas" else of_runs
    blocks = (block.local for outcome in run.full_outcomes for block in outcome.get(name, ()))
    return spread <= min((last_bits(local) for local in blocks), default=0.0)


def explanation_of(evidence: Evidence, findings: Mapping[str, Finding]) -> Explanation:
    """Where a case with failed checks first went wrong, and why.

    If the case is already wrong when it is run with fewer steps, its first place there is returned.
    """
    earlier, known = evidence.search.earlier or (None, {})
    if earlier is not None and wrong_names(earlier.run, earlier.truth, known):
        ended = explanation_of(earlier, known)
        running = "found by running with steps="
        seen = f"{running}{earlier.run.case.steps}"
        if earlier.search.earlier and any(line.startswith(running) for line in ended.first.beside):
            return ended  # it was ended even earlier
        return replace(ended, first=replace(ended.first, beside=(*ended.first.beside, seen)))
    findings = faults_of(evidence.run, findings)[0]
    wrong = wrong_names(evidence.run, evidence.truth, findings)
    ledger_failed = "ledger" in findings and findings["ledger"].verdict == FAIL
    parted = _first_difference(evidence, wrong) if ledger_failed else None
    calls = evidence.run.calls
    laws = broken_laws(calls.events) if ledger_failed and parted is None and not calls.ran else []
    first = first_place(evidence, wrong, parted, next(iter(laws), None))
    call_first = parted is not None and first.step < 0

    def causes_of(names: Sequence[str]) -> tuple[Cause, ...]:
        known = (name for name in names if name in evidence.truth.tensors and name in evidence.run.returned)
        numbers = [name for name in known if is_comparable(evidence.run, evidence.truth, name)]
        return likely_causes(
            Failure(
                evidence=evidence, wrong=names, numbers=numbers, findings=findings, parted=parted, call_first=call_first
            )
        )

    causes = causes_of(wrong)
    # Tensors of the first micro-batch may show what activations of a later one do not.
    if not causes and evidence.search.observed != (0, 0):
        causes = causes_of([name for name in wrong if kind_of(name) not in ("act", "act_grad")])
    agreed = AgreementByKind()
    if not causes:
        agreed = find_agreement(evidence.run, evidence.truth, wrong, _find_undecided_names(evidence.truth, findings))
    return Explanation(first=first, causes=causes, agreement=agreed)


def _find_undecided_names(truth: Truth, findings: Mapping[str, Finding]) -> set[str]:
    """Names of the truth of which no check decides whether they are right."""
    compared = {kind for check, kinds in NUMERIC_KINDS.items() if check in findings for kind in kinds}
    noted = {name for finding in findings.values() for name in noted_names(finding.notes)}
    return noted | {name for name in truth.tensors if kind_of(name) not in compared}


def wrong_names(run: RecordedRun, truth: Truth, findings: Mapping[str, Finding]) -> list[str]:
    """The names that failed checks found wrong, in the order in which training computes them."""
    names = {name for finding in findings.values() if finding.verdict == FAIL for name in finding.names}
    known = [*truth.tensors, *sorted(names - set(truth.tensors))]
    return [name for name in order_by_time(known, run.case.steps) if name in names]


def diagnose(
    evidence: Evidence, findings: Mapping[str, Finding], check: str, known: Explanation | None = None
) -> Diagnosis:
    """Diagnose a failed check, given all findings of its case; `known` is the explanation that they share."""
    finding = findings[check]
    name = finding.worst.name if finding.wrong and finding.worst else next(iter(finding.names), "")
    place = place_of(name, evidence.run.case.steps) if name else None
    mine = next(fault for fault in faults_of(evidence.run, findings) if check in fault)
    shared = known or explanation_of(evidence, mine)
    first = shared.first
    return Diagnosis(
        check=check,
        name=name or (finding.worst.name if finding.worst else ""),
        ranks=finding.ranks or wrong_ranks(evidence.run, evidence.truth, name),
        step=place.step if place else -1,
        phase=finding.phase or (place.phase if place else ""),
        region=finding.region or (place.module if place else ""),
        first=first if first.phase or first.event else replace(first, phase=finding.phase, region=finding.region),
        causes=shared.causes,
        agreement=shared.agreement,
    )


def diagnose_ended_case(error: ShardproofError) -> Diagnosis:
    """Diagnose a case that ended without an outcome."""
    if isinstance(error, Desynchronised):
        known, fact = "desynchronised", "calls_parted"
    elif isinstance(error, RankCrashed):
        known, fact = "raised", "process_ended"
    elif isinstance(error, Stalled):
        known, fact = "desynchronised", "no_further_call"
    elif isinstance(error, ProgramError):
        known, fact = "raised", "raised"
    else:
        known, fact = "machine", "time_up" if isinstance(error, TimeLimit) else "machine_failed"
    ranks, causes = tuple(getattr(error, "ranks", ())), (report_cause(known, state_fact(fact), error),)
    step, phase, region = getattr(error, "site", (-1, "", ""))
    first = First(phase=phase, region=region, step=step)
    return Diagnosis(check="run", ranks=ranks, step=step, phase=phase, region=region, first=first, causes=causes)


def _first_difference(evidence: Evidence, wrong: Sequence[str]) -> Difference | None:
    """The first difference of the ledger. If numbers are wrong, wrong payloads in modules of experts do not count.

    The choice of experts follows from numbers, and decides how many rows the calls of these modules have.
    """
    if evidence.claims.expectation is None:
        return None
    parted = find_differences(
        evidence.run.calls.events,
        evidence.claims.expectation,
        evidence.run.calls.ranks,
        module_order(evidence.run.calls, evidence.claims, evidence.truth),
        axes=evidence.claims.axes,
    )
    chosen = [name for name in evidence.run.returned if wrong and kind_of(name) == "routing"]
    choices = {place_of(name, evidence.run.case.steps).module for name in chosen}
    return next(iter(but_for_bytes(parted, choices)), None)
