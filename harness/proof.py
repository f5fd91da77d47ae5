"""One case proved: the truth, the subject recorded, the subject again unrecorded, and every check on what they gave.

The harness imports no model: the reference is named like any subject. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.checks import CHECKS, Check, examine
from harness.diagnosis import case_text, crash, explain
from harness.engines.engine import Engine
from harness.errors import MachineError, ProgramError, RequestError
from harness.evidence import FAIL, PASS, SKIP, UNKNOWN, Evidence, Finding, Verdict, gathered
from harness.exact_checks import same_outcomes
from harness.execution import execute, execute_captured
from harness.ledger import Event
from harness.protocols import CaseLike, Subject, TermLike
from harness.resolve import resolve

__all__ = ["REFERENCE", "CaseResult", "Reference", "expectation_of", "prove", "skip_reason"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Names of the dense model's functions (case, device) -> outcome: the truth, and the control run beside it."""

    truth: str = "reference.subject:truth"
    true_activations: str = "reference.subject:true_activations"
    control: str = "reference.control:control"
    control_activations: str = "reference.control:control_activations"


REFERENCE = Reference()


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Everything known of one case: `skipped` says why it was not run, `machine` why the machine could not finish it.

    `evidence` is None unless all runs finished. `seconds` by part: truth, control, recorded, plain, again, checks.
    """

    case: CaseLike
    text: str
    verdicts: tuple[Verdict, ...]
    evidence: Evidence | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""
    machine: str = ""

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
    subject_name: str,
    engine: Engine,
    *,
    reference: Reference = REFERENCE,
    checks: Mapping[str, Check] = CHECKS,
    device: str = "cpu",
    timeout_s: float = 60.0,
    options: str = "",
) -> CaseResult:
    """Run and check one case. `options` are further words of the command that repeats it.

    Raises RequestError when the subject cannot be found or the case cannot be computed (unreadable data); whatever the
    subject does wrong is a failed verdict.
    """
    subject: Any = resolve(subject_name)
    text, seconds = case_text(case), dict[str, float]()
    if reason := skip_reason(case, subject, subject_name):
        skip = Verdict(case=text, check="supported", verdict=SKIP, worst=None, message=reason)
        return CaseResult(case=case, text=text, verdicts=(skip,), skipped=reason)
    try:
        evidence, problems = _evidence(case, subject, engine, reference, device, timeout_s, seconds)
    except ProgramError as error:
        message = crash(case, subject_name, str(error), options)
        failed = Verdict(case=text, check="run", verdict=FAIL, worst=None, message=message)
        return CaseResult(case=case, text=text, verdicts=(failed,), seconds=seconds)
    except MachineError as error:
        lost = Verdict(case=text, check="run", verdict=UNKNOWN, worst=None, message=f"the machine failed: {error}")
        return CaseResult(case=case, text=text, verdicts=(lost,), seconds=seconds, machine=str(error))
    with _Timed(seconds, "checks"):
        findings = examine(evidence, checks)
        for check, problem in problems.items():
            if problem:
                findings[check] = Finding(verdict=UNKNOWN, message=problem, unchecked=(check,))
        verdicts = tuple(_verdict(evidence, findings, check, subject_name, options) for check in findings)
    return CaseResult(case=case, text=text, verdicts=verdicts, evidence=evidence, seconds=seconds)


def skip_reason(case: CaseLike, subject: Subject, subject_name: str) -> str:
    """Why the subject does not take this case, "" when it does."""
    modes = getattr(subject, "modes", None)
    if modes is not None and case.mode not in modes:
        return f"{subject_name} claims the modes {', '.join(modes) or 'none'}, not {case.mode}"
    refuses = getattr(subject, "refuses", None)
    return str(refuses(case) or "") if refuses is not None else ""


def expectation_of(case: CaseLike, subject: Subject) -> tuple[tuple[TermLike, ...] | None, str]:
    """The subject's closed form of the case (None when it has none), and what went wrong in asking for it."""
    expected: Callable[[CaseLike], Any] | None = getattr(subject, "expected", None)
    if expected is None:
        return None, ""
    try:
        terms = expected(case)
        return (None if terms is None else tuple(terms)), ""
    except Exception as problem:  # a broken expectation is no verdict on the run, and must not read as "none stated"
        return None, f"the subject's expectation failed: {type(problem).__name__}: {problem}"


def _evidence(
    case: CaseLike,
    subject: Subject,
    engine: Engine,
    reference: Reference,
    device: str,
    timeout_s: float,
    seconds: dict[str, float],
) -> tuple[Evidence, dict[str, str]]:
    """All runs of a case, and what could not be asked of the subject: check -> why, "" when it could."""
    text = case_text(case)
    with _Timed(seconds, "truth"):
        truth = _dense(reference.truth, case, device) | _dense(reference.true_activations, case, device)
    control: dict[str, Tensor] = {}
    if case.dtype != "float64":
        with _Timed(seconds, "control"):
            control = _dense(reference.control, case, device) | _dense(reference.control_activations, case, device)
    with _Timed(seconds, "recorded"):
        recorded = execute(case, subject, engine, text=text, device=device, timeout_s=timeout_s)
    with _Timed(seconds, "plain"):
        plain = execute_captured(case, subject, engine, device=device, timeout_s=timeout_s)
    repeats = [plain.outcomes]
    if not same_outcomes(recorded.outcomes, plain.outcomes):
        with _Timed(seconds, "again"):  # tells a subject that is not deterministic from a recording that disturbs it
            again = execute(case, subject, engine, text=text, record=False, device=device, timeout_s=timeout_s)
        repeats.append(again.outcomes)
    expectation, problem = expectation_of(case, subject)
    evidence = Evidence(
        case=case,
        outcomes=recorded.outcomes,
        captured=plain.captured,
        merged=gathered(recorded.outcomes, plain.captured, truth),
        truth=truth,
        control=control,
        events=recorded.events,
        expectation=expectation,
        repeats=tuple(repeats),
        unwaited=recorded.unwaited,
    )
    return evidence, {"expectation": problem, "activations": plain.problem}


def _dense(name: str, case: CaseLike, device: str) -> dict[str, Tensor]:
    """What a function of the reference computes, on the CPU."""
    function: Any = resolve(name)
    try:
        outcome: Mapping[str, Tensor] = function(case, torch.device(device))
    except (ValueError, OSError) as problem:
        raise RequestError(f"case {case_text(case)!r}: the dense model cannot compute it: {problem}") from problem
    return {key: tensor.detach().cpu() for key, tensor in outcome.items()}


def _verdict(
    evidence: Evidence, findings: Mapping[str, Finding], check: str, subject_name: str, options: str
) -> Verdict:
    finding = findings[check]
    message = finding.message
    if finding.verdict == FAIL:
        try:
            message = explain(evidence, findings, check, subject_name, options)
        except Exception as problem:  # a failure that cannot be explained stays a failure
            message += f" (its diagnosis failed: {type(problem).__name__}: {problem})"
    return Verdict(
        case=case_text(evidence.case),
        check=check,
        verdict=finding.verdict,
        worst=finding.worst,
        message=message,
        unchecked=finding.unchecked,
    )


class _Timed:
    """Notes how long its body took, in seconds, also when the body raises."""

    def __init__(self, seconds: dict[str, float], part: str) -> None:
        self._seconds, self._part = seconds, part

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + time.perf_counter() - self._start_s
