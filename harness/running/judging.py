"""The findings of a run: what first looks wrong is looked at again by all that is known of rounding, then judged.

In float64 every tensor is first compared with training from the start, which rounding leaves alone (1e-13) unless
training amplifies it. Where the first step agrees and a later one does not:

1. Every step is compared with the dense model's step from the subject's own state before it, with what Adam may make
   of gradients within rounding of zero. What is beyond that is wrong.
2. When nothing is, training from the start still counts for every tensor for which it is well conditioned: control runs
   of it allow no more than CONDITIONED. With Adam it never is: full steps are made out of rounding.

In lower precision every step is compared from the subject's own state at once. No error that
rounding may explain is called wrong before more control runs were made.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.checking.checks import CHECKS, Check, examine
from harness.checking.evidence import Evidence, Finding
from harness.checking.numeric_checks import NUMERIC_KINDS
from harness.checking.tolerance import CONTROL_FACTOR, Measured, distance, is_state, step_of
from harness.running.rounding import control_run, controlled, doubtful, stepwise
from harness.running.trial import Trial

__all__ = ["CONDITIONED", "judged"]

CONDITIONED = 1e-8
"""Training from the start is well conditioned for a tensor for which control runs of it allow no more than this."""

Found = tuple[Evidence, dict[str, Finding]]


def judged(trial: Trial, evidence: Evidence, checks: Mapping[str, Check] = CHECKS) -> Found:
    """What these checks find, and the evidence with every control run that they came to need."""
    if evidence.case.dtype != "float64":
        evidence = stepwise(trial, evidence)
    findings = examine(evidence, checks)
    wrong = _wrong(findings)
    if evidence.states is not None or not wrong or any(_in_first_step(measured.name) for measured in wrong):
        return _doubted(trial, evidence, findings, checks)
    stepped = stepwise(trial, evidence)
    if stepped.states is None:
        return _doubted(trial, evidence, findings, checks)
    one_step = _doubted(trial, stepped, _again(stepped, findings, checks), checks)
    if (
        _wrong(one_step[1])
        or stepped.slack
        or not any(_conditioned(trial, evidence, measured.name) for measured in wrong)
    ):
        return one_step
    from_start = _doubted(trial, evidence, findings, checks)
    return from_start if any(m.allowed <= CONDITIONED for m in _wrong(from_start[1])) else one_step


def _wrong(findings: Mapping[str, Finding]) -> list[Measured]:
    return [measured for finding in findings.values() for measured in finding.wrong]


def _in_first_step(name: str) -> bool:
    """Whether a tensor is of the first step, before the optimizer: neither states nor training come into it."""
    named = name.startswith(("act/", "act_grad/", "grad/"))
    return named or (step_of(name) == 0 and not is_state(name))


def _conditioned(trial: Trial, evidence: Evidence, name: str) -> bool:
    """Whether the first control run of training from the start stays near enough for this tensor."""
    control = control_run(trial).get(name)
    if control is None:
        return False
    return CONTROL_FACTOR * distance(control, evidence.truth[name]).frobenius <= CONDITIONED


def _doubted(trial: Trial, evidence: Evidence, findings: dict[str, Finding], checks: Mapping[str, Check]) -> Found:
    """The findings with more control runs, where rounding may explain what is wrong."""
    if not doubtful(evidence, _wrong(findings)):
        return evidence, findings
    evidence = controlled(trial, evidence)
    return evidence, _again(evidence, findings, checks)


def _again(evidence: Evidence, findings: Mapping[str, Finding], checks: Mapping[str, Check]) -> dict[str, Finding]:
    """The findings with those that compare numbers made anew."""
    return {**findings, **examine(evidence, {name: checks[name] for name in findings if name in NUMERIC_KINDS})}
