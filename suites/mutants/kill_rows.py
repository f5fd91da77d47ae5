"""Rows of the kill matrix: a mutant, variant or fault in one mode, proved, and how right its diagnosis was.

A mutant is proved in the cases that the profile `default` draws and that can show it, smallest first, until a check
fails. Its time is that of all of them, planting included. A fault disturbs one collective of a small case.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

from shardproof.bugs.planting import Subject
from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.diagnosing.diagnosis import Diagnosis
from shardproof.harness.engines.engine import Engine
from shardproof.harness.faults import Fault
from shardproof.harness.protocols import CaseLike
from shardproof.harness.running.experiments import Failed, words_needed
from shardproof.harness.running.injecting import (
    AND_MORE,
    MISLEADING,
    NO,
    NONE,
    RIGHT,
    UNCHANGED,
    UNREAD,
    YES,
    FaultResult,
    Kill,
    survey_faults,
    unproved_collectives,
)
from shardproof.harness.running.proof import prove
from shardproof.harness.running.result import CaseResult
from shardproof.harness.subject import NamedSubject, resolve_subject
from shardproof.harness.verdicts.verdict import FAIL, PASS
from shardproof.harness.verdicts.words import when_line
from shardproof.suites.mutants.catalogue import Mutant, cases_showing

TRIES = 10
"""The most drawn cases in which a mutant is proved before it counts as a survivor."""
WHEN_S = 10.0
"""How long the words that one failure needs are searched."""
_OTHER_SEEDS = (1, 2)
"""The seeds of further cases for faults that one case does not show."""
_BY_BITS = {UNCHANGED, UNREAD}
"""Proofs that rest on the numbers of one run."""
_MEANING = {
    "drop": "a collective is left out",
    "double": "a collective is done twice",
    "op": "another reduction",
    "group": "another group of ranks",
    "stale": "the result of the call before",
    "delay": "the result is used before it is there",
    "poison": "memory that nobody wrote",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """A row and its evidence: the case that killed it (else the last one), and what its diagnosis reported.

    `unmissed` says, if a dropped collective was not missed, why no check proves it necessary.
    """

    row: Kill
    case: str
    diagnosed: str
    unmissed: str = ""


def mutant_killed(
    mutant: Mutant,
    mode: str,
    engine: Engine,
    timeout_s: float = 60.0,
    dtype: str = "",
    *,
    twin: bool = False,
    explain: bool = True,
) -> Killed:
    """The row of one mutant or variant in one mode; in cases of `dtype` if these can show it.

    With `twin` also the words that the failure needs, and whether the last case is quiet without the bug. Without
    `explain` the failure is not diagnosed: the row has no right place and no cause.
    """
    if mutant.equivalent:
        return Killed(row=_row(mutant, mode, None, 0.0), case="", diagnosed="")
    start_s = time.perf_counter()
    result: CaseResult | None = None
    when = ""
    with mutant.subject() as subject:
        for case in itertools.islice(cases_showing(mutant, mode, dtype), TRIES):
            result = prove(case, subject, engine, timeout_s=timeout_s, explain=explain)
            if result.verdict == FAIL:
                when = when_of(result, subject, engine) if twin else ""
                break
    row = _row(mutant, mode, result, time.perf_counter() - start_s)
    if twin and result:
        row = replace(row, when=when, twin=quiet_without(result, engine, timeout_s))
    return Killed(
        row=row, case=result.text if result else "", diagnosed=_describe_diagnosis(result.diagnosis) if result else ""
    )


def quiet_without(result: CaseResult, engine: Engine, timeout_s: float) -> str:
    """Whether the case of this result passes every check without the bug, YES or NO; a case loses its `variant=`."""
    case = result.case
    right = case.but(variant="") if getattr(case, "variant", "") else case
    return YES if prove(right, SUBJECT, engine, timeout_s=timeout_s, explain=False).verdict == PASS else NO


def when_of(result: CaseResult, subject: Subject | str, engine: Engine) -> str:
    """The line `when:` of a failed case, while the bug is planted."""
    given = resolve_subject(subject)
    failed = Failed(case=result.case, verdicts=result.verdicts)
    proving = partial(prove, subject=given, engine=engine, explain=False)
    return when_line(words_needed(failed, given, proving, WHEN_S).when)


def _row(mutant: Mutant, mode: str, result: CaseResult | None, seconds: float) -> Kill:
    diagnosis = result.diagnosis if result else None
    failed = result is not None and result.verdict == FAIL
    attribution = cause_told(mutant, diagnosis) if failed else ""
    return Kill(
        name=mutant.name,
        kind=mutant.kind,
        stands_for=mutant.stands_for,
        mode=mode,
        phase=mutant.phase,
        region=mutant.region,
        killed_by=tuple(v.check for v in result.verdicts if v.verdict == FAIL) if result else (),
        equivalent=mutant.equivalent,
        seconds=seconds,
        region_right=right_place(mutant, diagnosis) if failed else "",
        cause_right=("yes" if attribution in (RIGHT, AND_MORE) else "no") if mutant.cause and attribution else "",
        held_back=mutant.held_back,
        cause_told=attribution,
    )


def right_place(mutant: Mutant, diagnosis: Diagnosis | None) -> str:
    """Whether the first place that the diagnosis reports is the mutant's: yes, no, or "" when it has none.

    A failure whose diagnosis raised (None) has no place and no cause: no. Between the last backward and the optimizer's
    step no module runs, so there the phase alone is the place.
    """
    if not mutant.phase:
        return ""
    if diagnosis is None:
        return "no"
    first = diagnosis.first
    between = first.phase == "grad_sync" and not first.region
    in_region = between or any(fnmatchcase(first.region, pattern) for pattern in mutant.region.split("|"))
    return "yes" if in_region and first.phase in mutant.phase.split("|") else "no"


def cause_told(mutant: Mutant, diagnosis: Diagnosis | None) -> str:
    """Judgement of the reported cause by the ids alone, one of `harness.running.injecting.JUDGEMENTS`."""
    named = [cause.id for cause in diagnosis.causes] if diagnosis else []
    accepted = set(mutant.cause.split("|"))
    if not named:
        return NONE
    if named[0] not in accepted:
        return MISLEADING
    return RIGHT if set(named) <= accepted else AND_MORE


def _describe_diagnosis(diagnosis: Diagnosis | None) -> str:
    """First place, what shows it, and the causes by their ids."""
    if diagnosis is None:
        return ""
    first = diagnosis.first
    causes = " ".join(dict.fromkeys(cause.id for cause in diagnosis.causes)) or "none"
    shown = first.name or first.event or "-"
    return f"{first.phase or '-'} of {first.region or 'no module'} ({shown}); causes: {causes}"


def faults_killed(
    case: CaseLike, faults: Sequence[Fault], subject: NamedSubject, engine: Engine, timeout_s: float = 60.0
) -> list[Killed]:
    """The rows of these faults of a subject's collectives, in this case.

    Faults that survive in this case, or leave its run unchanged, are run in others. Its numbers may hide them, as a
    count of zero hides that it was not summed.
    """
    surveyed = partial(survey_faults, subject=subject, engine=engine, timeout_s=timeout_s)
    results = {result.fault: (case, result) for result in surveyed(case, faults=faults)}
    for seed in _OTHER_SEEDS:
        hidden = [fault for fault, (_, result) in results.items() if result.survived or result.equivalent in _BY_BITS]
        other = case.but(seed=seed)
        for result in surveyed(other, faults=hidden) if hidden else ():
            shown = result.killed or (results[result.fault][1].equivalent and result.survived)
            results[result.fault] = (other, result) if shown else results[result.fault]
    unmissed = {one.target: one.why for one in unproved_collectives(result for _, result in results.values())}
    return [
        _fault_row(where, result, unmissed.get(fault.target, "") if fault.kind == "drop" else "")
        for fault, (where, result) in results.items()
    ]


def _fault_row(case: CaseLike, result: FaultResult, unmissed: str) -> Killed:
    fault = result.fault
    row = Kill(
        name=str(fault),
        kind="fault",
        stands_for=_MEANING[fault.kind],
        mode=case.mode,
        phase=fault.target.phase,
        region=fault.target.region,
        killed_by=result.killed_by,
        equivalent=result.equivalent,
        seconds=result.seconds,
        region_right="",
        cause_right="",
        machine=result.machine,
    )
    return Killed(row=row, case=str(case), diagnosed=result.machine, unmissed=unmissed)
