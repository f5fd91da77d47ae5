"""Proves one case: its runs, every check of them, and verdicts whose failures are explained.

The runs follow from the records that the checks need: the subject recorded, once more unrecorded (`Repeats`), in other
groupings (`Regroupings`), with some documents changed (`Documents`), and the dense model (`Truth`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shardproof.harness.checking.checks import CHECKS, LAWS, Check, records_of, select_checks_by_need
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.records import Documents, Regroupings, Repeats, Truth
from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.rank_environment import one_thread
from shardproof.harness.errors import MachineError, NoNumbers, NotComputed, ProgramError, ShardproofError
from shardproof.harness.protocols import CaseLike, Subject, case_text
from shardproof.harness.running.ranks.capacity import admit_ranks
from shardproof.harness.running.result import CaseResult, verdict_on
from shardproof.harness.running.trials.document_runs import run_documents
from shardproof.harness.running.trials.dry import check_dry_run
from shardproof.harness.running.trials.law_runs import run_regroupings
from shardproof.harness.running.trials.runs import judge_case, record_case
from shardproof.harness.running.trials.trial import EXPLAINED_IN, Reference, Trial, Truths, reference_of
from shardproof.harness.subject import (
    NamedSubject,
    Unanswered,
    kept_per_rank,
    lower_dtypes,
    refusal,
    resolve_subject,
    stated_deviations,
    truth_of,
)
from shardproof.harness.torch_internals.autograd import give_back
from shardproof.harness.torch_internals.compiler import leave_unloaded
from shardproof.harness.verdicts.facts import FailedCheck, Note, NoteKind, note_unchecked, state_fact, state_text
from shardproof.harness.verdicts.verdict import FAIL, SKIP, UNKNOWN, Verdict

if TYPE_CHECKING:
    from shardproof.harness.diagnosing.diagnosis import Diagnosis

_UNDECIDED = (NoNumbers, NotComputed)
"""Errors of an engine that could not finish a program, although the program may be right."""


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
    repeat: bool = True,
) -> CaseResult:
    """Run and check one case on a subject, named or given. `options`: further words of the command that repeats it.

    Without `explain` a failure is not diagnosed, and takes no further runs. Without `repeat` the subject runs once, and
    two runs are compared only if another check fails. `reference` replaces the subject's own truth, or the decoder.
    `truths`: what the dense model computed for the case before, on this device and with this reference. `heard` is
    called with the name of every part of the proof as it begins ("recorded", "truth", ..). Raises RequestError if there
    is no such subject, if a claim of it is wrong (`per_rank`), if the machine cannot hold the ranks, or if the dense
    model cannot compute the case (unreadable data). Any error of the subject's program is a failed verdict.
    """
    given = resolve_subject(subject)
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
        kept_per_rank(trial.subject.call)  # raises for a wrong `per_rank`
        if not reason:
            _ = lower_dtypes(case, given), stated_deviations(case, given)  # both raise for wrong claims, before any run
    except Unanswered as problem:
        verdict, reason = UNKNOWN, str(problem)
    if reason:
        skip = Verdict(case=trial.text, check="supported", verdict=verdict, facts=(state_text(reason),))
        return CaseResult(case=case, text=trial.text, verdicts=(skip,), skipped=reason)
    options = f"{options} --truth {given.truth}".lstrip() if given.truth else options
    leave_unloaded()
    if checks is CHECKS and truth_of(given) is not None:  # laws test a subject's own truth; our dense model has tests
        checks = {**CHECKS, **LAWS}
    try:
        with one_thread():
            if not repeat:
                checks = {name: check for name, check in checks.items() if Repeats not in records_of(check)}
            return _prove_trial(trial, checks, options, explain=explain)
    except (ProgramError, MachineError) as error:
        return replace(ended_by(trial.case, trial.subject.name, error, options), seconds=trial.seconds)


def _prove_trial(trial: Trial, checks: Mapping[str, Check], options: str, *, explain: bool) -> CaseResult:
    """Run, compare, and explain what failed."""
    is_dry, compare = trial.engine.name == "dry", bool(select_checks_by_need(checks, Truth))
    if is_dry:
        evidence, findings = check_dry_run(trial)
    else:
        evidence = record_case(trial, repeat=bool(select_checks_by_need(checks, Repeats)), compare=compare)
        give_back(evidence.run.tensors.values())
        if select_checks_by_need(checks, Regroupings):
            evidence = replace(evidence, regroupings=run_regroupings(trial, evidence.truth))
        if evidence.run.calls.packed and select_checks_by_need(checks, Documents):
            evidence = replace(evidence, documents=run_documents(trial))
        with trial.time_part("checks"):
            evidence, findings = judge_case(trial, evidence, checks)
    failures: Mapping[str, FailedCheck] = {}
    diagnoses: Mapping[str, Diagnosis] = {}
    if explain or is_dry:
        failed = any(finding.verdict == FAIL for finding in findings.values())
        context: Mapping[str, Finding] = findings
        if failed:
            from shardproof.harness.running.explaining import diagnose_findings, with_explanations  # noqa: PLC0415  (few cases fail: a third of the product)
        if failed and not is_dry:
            # the explanation needs the dense model, whatever the failed check needs
            evidence = evidence if compare else record_case(trial)
            evidence, context = with_explanations(trial, evidence, findings)
        findings |= _find_problems(trial)
        if failed:
            diagnoses, failures = diagnose_findings(evidence, findings, context, trial.subject.name, options)
    verdicts = tuple(verdict_on(finding, trial.text, check, failures.get(check)) for check, finding in findings.items())
    seconds = trial.seconds if explain or is_dry else {}
    return CaseResult(
        case=trial.case, text=trial.text, verdicts=verdicts, evidence=evidence, seconds=seconds, diagnoses=diagnoses
    )


def _find_problems(trial: Trial) -> dict[str, Finding]:
    """Findings on what is missing, by check: answers of the subject, and runs of the explanation that had no time."""
    found = {
        check: Finding(verdict=UNKNOWN, facts=(state_text(problem),), notes=note_unchecked(check))
        for check, problem in trial.problems.items()
    }
    if refused := trial.budget.refused:
        known, limit_s = found.get("explanation"), EXPLAINED_IN * trial.timeout_s
        facts = (*(known.facts if known else ()), state_fact("not_run", parts=refused, limit_s=limit_s))
        notes = (Note(kind=NoteKind.NOT_RUN, names=tuple(refused)),)
        found["explanation"] = Finding(verdict=UNKNOWN, facts=facts, notes=notes)
    return found


def ended_by(case: CaseLike, subject: str, error: ShardproofError, options: str = "") -> CaseResult:
    """The result of a case without an outcome: the program failed, or the machine."""
    from shardproof.harness.running.explaining import explain_end  # noqa: PLC0415  (as above: few cases end so)

    text = case_text(case)
    machine = str(error) if isinstance(error, MachineError) else ""
    undecided = bool(machine) or isinstance(error, _UNDECIDED)
    failure, diagnosis, traceback = explain_end(case, subject, error, options)
    verdict = Verdict(
        case=text,
        check="run",
        verdict=UNKNOWN if undecided else FAIL,
        facts=(state_text(error.cause if isinstance(error, ProgramError | MachineError) else str(error)),),
        kind=" ".join((type(error.__cause__ or error).__name__, getattr(error, "kind", ""))).rstrip(),
        failure=None if isinstance(error, _UNDECIDED) else failure,
    )
    return CaseResult(
        case=case, text=text, verdicts=(verdict,), machine=machine, traceback=traceback, diagnoses={"run": diagnosis}
    )
