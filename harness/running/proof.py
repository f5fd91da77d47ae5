"""One case proved: its runs, every check on them, and verdicts whose failures explain themselves.

`checks` decides how much is run: those that need captured activations or a second run are in NEED_WATCHING. Times are
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from harness.checking.checks import CHECKS, DRY_CHECKS, LAWS, Check, examine
from harness.checking.evidence import FAIL, PASS, SKIP, UNKNOWN, Evidence, Finding, Verdict
from harness.diagnosing.diagnosis import Diagnosis, diagnose, ended
from harness.diagnosing.diagnosis import explained as what_they_share
from harness.diagnosing.other_sizes import of_other_sizes
from harness.diagnosing.six_lines import NO_OUTCOME, crash, tell
from harness.diagnosing.tracebacks import whole
from harness.engines.engine import Engine
from harness.engines.shapes.dry import DryEngine
from harness.errors import MachineError, NoNumbers, NotComputed, ProgramError, ShardproofError
from harness.ledger import Event
from harness.protocols import CaseLike, Subject, TermLike, case_text
from harness.running.judging import judged
from harness.running.locating.drawn import with_drawn_numbers
from harness.running.locating.wrong_module import with_wrong_module
from harness.running.ranks.capacity import admit_ranks
from harness.running.store import Store
from harness.running.trials.law_runs import regrouped
from harness.running.trials.runs import dry_evidence, elsewhere, explained, recorded, watched
from harness.running.trials.trial import Trial
from harness.running.truth.reference import Reference, Truths, reference_of
from harness.subject import NamedSubject, Unanswered, deviating, kept_per_rank, lower_dtypes, named, refusal, truth_of
from harness.torch_internals.compiler import leave_unloaded
from harness.torch_internals.memory import give_back

_UNDECIDED = (NoNumbers, NotComputed)
"""Programs that an engine could not run to their end, and that may well be right."""
NEED_WATCHING = frozenset({"coverage", "activations", "activation_gradients", "determinism", "recording", "overlap"})
"""Checks that look at captured activations, at a second run or at what was computed during a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Everything known of one case: `skipped` says why it was not run, `machine` why the machine could not finish it.

    `evidence` is None unless all runs finished; `traceback` is the whole one of a rank that raised. `diagnoses` by
    failed check, in the order of the checks; "run" is the check of a case that ended without an outcome. `seconds` by
    part: truth, control, recorded, plain, again, checks.
    """

    case: CaseLike
    text: str
    verdicts: tuple[Verdict, ...]
    evidence: Evidence | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""
    machine: str = ""
    traceback: str = ""
    diagnoses: Mapping[str, Diagnosis] = field(default_factory=dict)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The first failed check explained, with the causes that all failed checks show; None when none failed."""
        told = list(self.diagnoses.values())
        causes = dict.fromkeys(cause for diagnosis in told for cause in diagnosis.causes)
        return replace(told[0], causes=tuple(causes)) if told else None

    @property
    def events(self) -> tuple[Event, ...]:
        """The ledger of the recorded run."""
        return self.evidence.events if self.evidence else ()

    @property
    def expectation(self) -> tuple[TermLike, ...] | None:
        """The closed form that the ledger was held against."""
        return self.evidence.expectation if self.evidence else None

    @property
    def verdict(self) -> str:
        """The worst of all verdicts; a case without any is unknown."""
        words = {verdict.verdict for verdict in self.verdicts}
        return next((word for word in (FAIL, UNKNOWN, SKIP, PASS) if word in words), UNKNOWN)


def prove(
    case: CaseLike,
    subject: str | Subject | NamedSubject,
    engine: Engine,
    *,
    reference: Reference | None = None,
    checks: Mapping[str, Check] = CHECKS,
    device: str = "cpu",
    timeout_s: float = 60.0,
    options: str = "",
    truths: Truths | None = None,
    heard: Callable[[str], object] = str,
    explain: bool = True,
) -> CaseResult:
    """Run and check one case on a subject, named or given. `options`: further words of the command that repeats it.

    Without `explain` a failure is not diagnosed, and takes no further runs. `reference` replaces the subject's own
    truth, or the decoder where it has none. `truths`: what the dense model computed for the case before, on this device
    and with this reference. `heard` is called with every part of the case.

    Raises RequestError when there is no such subject, the case has too many ranks for this machine, or the dense model
    cannot compute it (unreadable data); whatever the subject does wrong is a failed verdict.
    """
    given = named(subject)
    admit_ranks(case, engine.name)
    trial = Trial(
        case=case,
        subject=given,
        engine=engine,
        reference=reference or reference_of(given, engine, timeout_s),
        device=device,
        timeout_s=timeout_s,
        truths=truths or Truths(),
        heard=heard,
        verdict_alone=not explain,
    )
    try:
        verdict, reason = SKIP, refusal(case, trial.subject)
        kept_per_rank(trial.subject.call)  # every run needs it
        if not reason:
            _ = lower_dtypes(case, given), deviating(case, given)  # a wrong word is told before anything is run
    except Unanswered as problem:
        verdict, reason = UNKNOWN, str(problem)
    if reason:
        skip = Verdict(case=trial.text, check="supported", verdict=verdict, worst=None, message=reason)
        return CaseResult(case=case, text=trial.text, verdicts=(skip,), skipped=reason)
    options = f"{options} --truth {given.truth}".lstrip() if given.truth else options
    leave_unloaded()
    if checks is CHECKS and truth_of(given) is not None:  # the decoder's truth shows more, and sooner
        checks = {**CHECKS, **LAWS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on small tensors more threads only wait for each other, above all beside other work
    try:
        return _proved(trial, checks, options, explain=explain)
    except (ProgramError, MachineError) as error:
        return replace(ended_by(trial.case, trial.subject.name, error, options), seconds=trial.seconds)
    finally:
        torch.set_num_threads(threads)


def with_traceback(verdicts: tuple[Verdict, ...], case: str, traceback: str, store: Store) -> tuple[Verdict, ...]:
    """The verdicts of a case whose traceback, if it has one, is stored in a file that they name."""
    if not traceback:
        return verdicts
    file = store.attach("tracebacks", case, traceback)
    where = f"{NO_OUTCOME}; the whole traceback is in {file} of the run folder"
    return tuple(replace(one, message=one.message.replace(NO_OUTCOME, where)) for one in verdicts)


def _proved(trial: Trial, checks: Mapping[str, Check], options: str, *, explain: bool) -> CaseResult:
    if isinstance(trial.engine, DryEngine):
        evidence = dry_evidence(trial, trial.engine)
        with trial.timed("checks"):
            findings = examine(evidence, DRY_CHECKS)
        return _result(trial, evidence, findings, findings, options)
    looking = bool(NEED_WATCHING & set(checks))
    evidence = recorded(trial, watch=looking)
    give_back(evidence.merged.tensors.values())
    if LAWS.keys() & checks:
        evidence = regrouped(trial, evidence)
    with trial.timed("checks"):
        evidence, findings = judged(trial, evidence, checks)
    if not explain:
        verdicts = (found.verdict_on(trial.text, check) for check, found in findings.items())
        return CaseResult(case=trial.case, text=trial.text, verdicts=tuple(verdicts), evidence=evidence)
    context = findings
    if any(finding.verdict == FAIL for finding in findings.values()):
        if not looking:  # the first wrong place is told by activations
            evidence = watched(trial, evidence)
        with trial.timed("checks"):
            context = {**examine(evidence), **findings}
        wrong = {name for finding in context.values() if finding.verdict == FAIL for name in finding.names}
        evidence = with_drawn_numbers(trial, explained(trial, evidence, wrong), wrong)
        evidence = with_wrong_module(trial, evidence, wrong)
        evidence = _with_other_sizes(trial, evidence, context)
    return _result(trial, evidence, findings, context, options)


def _with_other_sizes(trial: Trial, evidence: Evidence, findings: Mapping[str, Finding]) -> Evidence:
    """The same evidence with that of one case for each size that a wrong factor equals and that is another there."""
    try:
        shared = what_they_share(evidence, findings)
    except Exception:  # the diagnosis of every check will say why
        return evidence
    sizes = tuple(dict.fromkeys(size for cause in shared.causes for size in cause.follows))
    first, others = shared.first.name, []
    for cases in of_other_sizes(evidence.case, sizes, shared.first.name):
        others += list(islice((seen for case in cases if (seen := elsewhere(trial, case, first))), 1))
    return replace(evidence, others=tuple(others))


def _result(
    trial: Trial, evidence: Evidence, findings: dict[str, Finding], context: Mapping[str, Finding], options: str
) -> CaseResult:
    """The verdicts of these findings; `context` are all findings by which a failure is explained."""
    for check, problem in trial.problems.items():
        findings[check] = Finding(verdict=UNKNOWN, message=problem, unchecked=(check,))
    diagnoses = _diagnosed(evidence, findings, {**context, **findings})
    text, name = trial.text, trial.subject.name
    verdicts = tuple(
        _verdict(text, evidence, findings[check], diagnoses.get(check), check, name, options) for check in findings
    )
    known = {check: found for check, found in diagnoses.items() if isinstance(found, Diagnosis)}
    return CaseResult(
        case=trial.case, text=text, verdicts=verdicts, evidence=evidence, seconds=trial.seconds, diagnoses=known
    )


def ended_by(case: CaseLike, subject: str, error: ShardproofError, options: str = "") -> CaseResult:
    """The result of a case without an outcome: a program that failed, or a machine."""
    text = case_text(case)
    machine = str(error) if isinstance(error, MachineError) else ""
    undecided = bool(machine) or isinstance(error, _UNDECIDED)
    verdict = Verdict(
        case=text,
        check="run",
        verdict=UNKNOWN if undecided else FAIL,
        worst=None,
        message=error.cause if isinstance(error, _UNDECIDED) else crash(case, subject, error, options),
    )
    return CaseResult(
        case=case,
        text=text,
        verdicts=(verdict,),
        machine=machine,
        traceback=whole(error),
        diagnoses={"run": ended(error)},
    )


def _diagnosed(
    evidence: Evidence, findings: Mapping[str, Finding], context: Mapping[str, Finding]
) -> dict[str, Diagnosis | Exception]:
    """Every failed check -> its diagnosis, or why there is none: a failure that cannot be explained stays one."""
    told: dict[str, Diagnosis | Exception] = {}
    shared = None
    for check, finding in findings.items():
        if finding.verdict == FAIL:
            try:
                shared = shared or what_they_share(evidence, context)
                told[check] = diagnose(evidence, context, check, shared)
            except Exception as problem:
                told[check] = problem
    return told


def _verdict(
    text: str,
    evidence: Evidence,
    finding: Finding,
    told: Diagnosis | Exception | None,
    check: str,
    name: str,
    options: str,
) -> Verdict:
    message = finding.message
    if isinstance(told, Diagnosis):
        message = tell(told, finding, evidence, name, options)
    elif told is not None:
        message += f" (its diagnosis failed: {type(told).__name__}: {told})"
    return finding.verdict_on(text, check, message)
