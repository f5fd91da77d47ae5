"""Fault injection, one fault of a subject after another: which checks notice it, and which calls no check would miss.

    results = survey_faults(case, subject, engine)
    for collective in unproved_collectives(results): print(collective.target, collective.why)

A fault is killed when a check fails that passes without it (`run` if the ranks do not even finish). A fault is
equivalent if no check can notice it, because the disturbed program computes the same; this takes a proof. Any other
fault has survived. Times are seconds.

A rule proves equivalence from the fault alone, in words; `subject.harmless(case, fault)` states what a subject knows of
its mathematics. Two more proofs need a run, and hold for its case. UNCHANGED: every call left the very bits that it
leaves undisturbed. UNREAD: every call but the disturbed ones did, and all that the subject returns has the same bits.
That no check fails is never taken for a proof.

The kill matrix has a row for each planted bug, fault or variant in each mode, and figures over all rows. Times are
seconds from planting to the verdict. `region_right` and `cause_right` are "yes", "no" or "" where the row has no place
or no right cause. The columns are a contract: `COLUMNS`.

`held_back` mutants are never looked at by authors of rules of diagnosis; their rows are written without a name.
`cause_told` is one of `JUDGEMENTS`, or "" where nothing was diagnosed (faults, survivors):

    right           the first cause that is reported is one that is right for this bug, and so are all others
    right and more  the first one is right, another one beside it is not
    none            no cause is reported
    misleading      the first one is not right, even if right ones follow

A bug may be measured beside the right code (`shardproof faults --field`). `twin` is "yes" when the same case without
the bug is quiet, and `when` is the line of words that the failure needs.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardproof.harness.checking.checks import CHECKS, Check, records_of, select_checks_by_need
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.records import Evidence, Repeats
from shardproof.harness.checking.repeats import same_outcomes
from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.faults.disturbance import Disturbance
from shardproof.harness.engines.rank_environment import one_thread
from shardproof.harness.engines.threads.inproc import Intervened, Intervention
from shardproof.harness.errors import MachineError, ProgramError, RequestError, TimeLimit
from shardproof.harness.faults import Fault, RankCallIndex, Target, faults_of
from shardproof.harness.ledger import Event
from shardproof.harness.outcome.merging import Outcomes
from shardproof.harness.protocols import CaseLike, Subject
from shardproof.harness.running.trials.runs import judge_case, record_case, repeat_plainly
from shardproof.harness.running.trials.trial import Trial, reference_of
from shardproof.harness.subject import NamedSubject, answer_question, offers, resolve_subject
from shardproof.harness.verdicts.verdict import FAIL, PASS

UNCHANGED = "every call left the bits that it leaves undisturbed, on every rank: it is the same run"
UNREAD = "every other call and all that the subject returns have the same bits: nothing depends on what was disturbed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the checks made of a planted fault: those that failed, the proof that no check can, and the seconds taken.

    `killed_by` is "run" if the program raises or does not end. `machine` says why the machine could not finish it.
    """

    killed_by: tuple[str, ...] = ()
    equivalent: str = ""
    machine: str = ""
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        """Whether a check noticed."""
        return bool(self.killed_by)

    @property
    def survived(self) -> bool:
        """Whether it is a fault and no check noticed it."""
        return not (self.killed_by or self.equivalent or self.machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A proof, in one line, that no check can notice the faults for which the rule holds."""

    proof: str
    holds: Callable[[Fault], bool]


def _doubling_rule(*ops: str, reduce_ops: Sequence[str] = ()) -> Callable[[Fault], bool]:
    """Whether a fault doubles a call of these ops, and of these reduce ops if any are given."""

    def holds(fault: Fault) -> bool:
        target = fault.target
        return fault.kind == "double" and target.op in ops and (not reduce_ops or target.reduce_op in reduce_ops)

    return holds


def _in_group_of_one(fault: Fault) -> bool:
    return fault.target.group_size == 1 and (
        fault.kind in {"drop", "op", "delay"} or _doubling_rule("all_reduce")(fault)
    )


RULES = (
    Rule(proof="in a group of one the rank's own data are the result, under any reduction", holds=_in_group_of_one),
    Rule(
        proof="max and min are idempotent: the result, reduced once more, is the result",
        holds=_doubling_rule("all_reduce", "reduce", "reduce_scatter", reduce_ops=("max", "min")),
    ),
    Rule(
        proof="after an average all ranks hold the same numbers, whose average they are",
        holds=_doubling_rule("all_reduce", reduce_ops=("avg",)),
    ),
    Rule(
        proof="what is moved once more, from inputs that the call does not change, is the same",
        holds=_doubling_rule("broadcast", "all_gather", "gather", "scatter"),
    ),
)


def proof_of(fault: Fault, rules: Sequence[Rule] = RULES) -> str:
    """Why no check can notice this fault; "" if no rule says so."""
    return next((rule.proof for rule in rules if rule.holds(fault)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult(Answer):
    """Result of one fault."""

    fault: Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Unproved:
    """A collective that no check proves necessary, and why: redundant traffic, or a blind spot of the checks."""

    target: Target
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Undisturbed:
    """The subject without a fault: its ledger, the passing checks, what it returned and what every call delivered.

    `seconds` is how long its runs and checks took.
    """

    events: tuple[Event, ...]
    outcomes: Outcomes
    checks: Mapping[str, Check]
    delivered: Mapping[RankCallIndex, bytes]
    seconds: float


_ENDLESS = 5.0
"""A program that takes this many times longer than without a fault is taken not to end."""
_LEAST_S = 10.0
"""The shortest time limit of a run, for busy machines."""


def survey_faults(
    case: CaseLike,
    subject: Subject | NamedSubject,
    engine: Engine,
    *,
    faults: Iterable[Fault] | None = None,
    checks: Mapping[str, Check] = CHECKS,
    rules: Sequence[Rule] = RULES,
    first_only: bool = False,
    device: str = "cpu",
    timeout_s: float = 60.0,
) -> list[FaultResult]:
    """The results of these faults, by default all legal ones. The dense model is computed once.

    With `first_only` the run with a fault is not repeated once a check of the single run has failed. Raises
    RequestError if the subject fails without a fault or passes no check, and MachineError if the machine does.
    """
    given = resolve_subject(subject)
    known = reference_of(given, engine, timeout_s)
    trial = Trial(case=case, subject=given, engine=engine, reference=known, device=device, timeout_s=timeout_s)
    with one_thread():
        clean = _run_undisturbed(trial, checks)
        asked = faults_of(clean.events, case.axes) if faults is None else tuple(faults)
        return [_result_of_fault(trial, fault, clean, rules, first_only) for fault in asked]


def unproved_collectives(results: Iterable[FaultResult]) -> list[Unproved]:
    """The targets in groups of several ranks whose loss no check notices and no rule excuses."""
    by_target: dict[Target, dict[str, FaultResult]] = {}
    for result in results:
        if result.fault.kind in {"drop", "poison"} and result.fault.rank < 0:
            by_target.setdefault(result.fault.target, {})[result.fault.kind] = result
    found = []
    for target, by_kind in by_target.items():
        dropped, poisoned = by_kind.get("drop"), by_kind.get("poison")
        unmissed = dropped is not None and (dropped.survived or dropped.equivalent in {UNCHANGED, UNREAD})
        if dropped is None or target.group_size == 1 or not unmissed:
            continue
        if dropped.equivalent == UNCHANGED:
            why = "redundant: every rank has the result before the call"
        elif dropped.equivalent == UNREAD and poisoned is not None and poisoned.equivalent == UNREAD:
            why = "dead traffic: no later call and nothing that is returned depends on the result"
        elif poisoned is not None and poisoned.survived:
            why = "dead traffic or a blind spot: nothing that is checked depends on the result"
        else:
            why = "redundant: what a rank has alone serves as well"
        found.append(Unproved(target=target, why=why))
    return found


def _run_undisturbed(trial: Trial, checks: Mapping[str, Check]) -> _Undisturbed:
    """The run without a fault. Raises RequestError if the subject does not finish, or passes no check."""
    clean, start_s = Disturbance(None), time.perf_counter()
    try:
        evidence, findings = _examine_trial(_intervene_on(trial, clean), checks, first_only=False)
    except ProgramError as error:
        raise RequestError(f"case {trial.text!r}: the subject does not finish undisturbed: {error.cause}") from error
    passing = {check: checks[check] for check, finding in findings.items() if finding.verdict == PASS}
    if not passing:
        raise RequestError(f"case {trial.text!r}: no check passes undisturbed, so none can notice a fault")
    return _Undisturbed(
        events=evidence.run.calls.events,
        outcomes=evidence.run.outcomes,
        checks=passing,
        delivered=dict(clean.delivered),
        seconds=time.perf_counter() - start_s,
    )


def _intervene_on(trial: Trial, intervention: Intervention) -> Trial:
    """The trial under an intervention, with what the reference has computed."""
    return replace(trial, engine=Intervened(trial.engine, intervention), seconds={}, problems={})


def _examine_trial(trial: Trial, checks: Mapping[str, Check], first_only: bool) -> tuple[Evidence, dict[str, Finding]]:
    """The findings of the checks. With `first_only` the run is repeated only if nothing has failed before."""
    of_one_run = {name: check for name, check in checks.items() if Repeats not in records_of(check)}
    evidence, findings = judge_case(trial, record_case(trial), of_one_run)
    if select_checks_by_need(checks, Repeats) and not (first_only and _names_of_failed_checks(findings)):
        evidence, findings = judge_case(trial, replace(evidence, repeats=repeat_plainly(trial, evidence.run)), checks)
    return evidence, findings


def _names_of_failed_checks(findings: Mapping[str, Finding]) -> tuple[str, ...]:
    return tuple(check for check, finding in findings.items() if finding.verdict == FAIL)


def _result_of_fault(
    trial: Trial, fault: Fault, clean: _Undisturbed, rules: Sequence[Rule], first_only: bool
) -> FaultResult:
    """Try a fault."""
    start_s = time.perf_counter()
    subject: Any = trial.subject.call
    proof = proof_of(fault, rules)
    if not proof and offers(subject, "harmless"):
        proof = answer_question("harmless", lambda: str(subject.harmless(trial.case, fault) or ""))
    made = FaultResult(fault=fault, equivalent=proof)
    if not made.equivalent:
        made = _try_fault(trial, fault, clean, first_only)
    return replace(made, seconds=time.perf_counter() - start_s)


def _try_fault(trial: Trial, fault: Fault, clean: _Undisturbed, first_only: bool) -> FaultResult:
    disturbance, endless_s = Disturbance(fault), max(_LEAST_S, _ENDLESS * clean.seconds)
    trial = replace(trial, timeout_s=min(trial.timeout_s, endless_s))
    try:
        evidence, findings = _examine_trial(_intervene_on(trial, disturbance), clean.checks, first_only)
    except ProgramError:
        return FaultResult(fault=fault, killed_by=("run",))
    except TimeLimit as error:
        if trial.timeout_s < endless_s:
            return FaultResult(fault=fault, machine=error.cause)
        return FaultResult(fault=fault, killed_by=("run",))
    except MachineError as error:
        return FaultResult(fault=fault, machine=error.cause)
    delivered, elsewhere = disturbance.delivered, clean.delivered.keys() - fault.places
    if killed_by := _names_of_failed_checks(findings):
        return FaultResult(fault=fault, killed_by=killed_by)
    if delivered == clean.delivered:
        return FaultResult(fault=fault, equivalent=UNCHANGED)
    unread = all(clean.delivered[place] == delivered.get(place) for place in elsewhere)
    unread = unread and same_outcomes(clean.outcomes, evidence.run.outcomes)
    return FaultResult(fault=fault, equivalent=UNREAD if unread else "")


YES, NO = "yes", "no"
FOUND = "fails with"
"""The beginning of a line `when:` that names words."""
RIGHT, AND_MORE, NONE, MISLEADING = JUDGEMENTS = ("right", "right and more", "none", "misleading")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(Answer):
    """One row of the matrix. `phase` and `region` are the place of the fault. A row with `machine` has no verdict."""

    name: str
    kind: str
    stands_for: str
    mode: str
    phase: str
    region: str
    region_right: str
    cause_right: str
    held_back: bool = False
    cause_told: str = ""
    twin: str = ""
    when: str = ""

    def cells(self) -> tuple[str, ...]:
        """The row as `kill_matrix.csv` has it, without anything that identifies a held-back mutant."""
        words = {
            **{field.name: str(getattr(self, field.name)) for field in dataclasses.fields(self)},
            "killed_by": " ".join(self.killed_by),
            "killed": YES if self.killed else NO,
            "equivalent": YES if self.equivalent else NO,
            "seconds": f"{self.seconds:.3f}",
            "held_back": YES if self.held_back else NO,
        }
        if self.held_back:
            words |= {"name": "held-back", "stands_for": "", "phase": "", "region": "", "when": ""}
        return tuple(words[column] for column in COLUMNS)

    @classmethod
    def of(cls, cells: Mapping[str, str]) -> "Kill":
        """The row with these cells, by column. Why a row is equivalent, and that it has no verdict, is not stored."""
        words = {name: cells[name] for name in ("name", "kind", "stands_for", "mode", "phase", "region")}
        words |= {name: cells[name] for name in ("region_right", "cause_right", "cause_told", "twin", "when")}
        return cls(
            **words,
            killed_by=tuple(cells["killed_by"].split()),
            equivalent=cells["equivalent"] if cells["equivalent"] == YES else "",
            seconds=float(cells["seconds"]),
            held_back=cells["held_back"] == YES,
        )


COLUMNS: tuple[str, ...] = (
    *("name", "kind", "stands_for", "mode", "phase", "region", "killed_by", "killed", "equivalent", "seconds"),
    *("region_right", "cause_right", "held_back", "cause_told", "twin", "when"),
)
"""Columns of `kill_matrix.csv`, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a matrix; shares are (how many, of how many).

    `cause_right` is out of the rows that have a right cause, other shares of causes out of all diagnosed rows.
    `cause_more` are rows with a wrong cause beside the right one. `unfinished` rows, which the machine could not
    finish, count in no share. `when_told` are rows for which needed words were found, `twin_quiet` those that are quiet
    without the bug.
    """

    killed: tuple[int, int]
    equivalent: int
    unfinished: int
    median_s: float
    region_right: tuple[int, int]
    cause_right: tuple[int, int]
    cause_more: tuple[int, int]
    cause_none: tuple[int, int]
    cause_misleading: tuple[int, int]
    when_told: tuple[int, int]
    twin_quiet: tuple[int, int]


def figures(rows: Sequence[Kill]) -> Figures:
    """Kill rate over rows that are not equivalent, the median time of kills, and how often the diagnosis was right."""
    real = [row for row in rows if not (row.equivalent or row.machine)]
    times = [row.seconds for row in real if row.killed]
    causes = [row.cause_told for row in real if row.cause_told]

    def share(answer: Callable[[Kill], str]) -> tuple[int, int]:
        known = [answer(row) for row in real if answer(row)]
        return known.count(YES), len(known)

    return Figures(
        killed=(sum(row.killed for row in real), len(real)),
        equivalent=sum(bool(row.equivalent) for row in rows),
        unfinished=sum(bool(row.machine) for row in rows),
        median_s=statistics.median(times) if times else 0.0,
        region_right=share(lambda row: row.region_right),
        cause_right=share(lambda row: row.cause_right),
        cause_more=(causes.count(AND_MORE), len(causes)),
        cause_none=(causes.count(NONE), len(causes)),
        cause_misleading=(causes.count(MISLEADING), len(causes)),
        when_told=(sum(row.when.startswith(FOUND) for row in real), sum(bool(row.when) for row in real)),
        twin_quiet=share(lambda row: row.twin),
    )


def killed_alone(rows: Iterable[Kill], checks: Sequence[str]) -> dict[str, tuple[int, int, str]]:
    """Check -> how many rows it kills, how many it alone kills, and the first of these not held back, or ""."""
    figures_by_check = {check: (0, 0, "") for check in checks}
    for row in rows:
        for check in row.killed_by:
            kills, alone, name = figures_by_check.get(check, (0, 0, ""))
            only = len(row.killed_by) == 1
            named = name or (row.name if only and not row.held_back else "")
            figures_by_check[check] = (kills + 1, alone + only, named)
    return figures_by_check
