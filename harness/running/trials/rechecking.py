"""The findings of a run: what first looks wrong is looked at again by all that is known of rounding, then judged.

In float64 every tensor is first compared with training from the start, which rounding leaves alone (1e-13) unless
training amplifies it. Where the first step agrees and a later one does not:

1. Every step is compared with the dense model's step from the subject's own state before it, with what Adam may make
   of gradients within rounding of zero. What is beyond that is wrong.
2. When nothing is, training from the start still counts for every tensor for which it is well conditioned: control runs
   of it allow no more than CONDITIONED. With Adam it never is: full steps are made out of rounding.

In lower precision every step is compared from the subject's own state at once. No error that
rounding may explain is called wrong before more control runs were made.

Tensors beyond these limits are judged again where the case computes or sends in a lower precision
(harness.running.trials.lower_precision).
"""

from collections.abc import Mapping
from dataclasses import replace

from shardproof.harness.checking.checks import LAWS, Check, examine
from shardproof.harness.checking.evidence import Finding
from shardproof.harness.checking.measures.distance import distance
from shardproof.harness.checking.measures.kinds import NUMERIC_KINDS
from shardproof.harness.checking.measures.tolerance import CONTROL_FACTOR
from shardproof.harness.checking.records import Evidence, Truth
from shardproof.harness.running.trials.law_runs import with_first_forward
from shardproof.harness.running.trials.lower_precision import (
    Found,
    as_found,
    as_stated,
    as_unseen,
    in_first_step,
    stated,
    wrong_of,
)
from shardproof.harness.running.trials.rounding import control_run, controlled, doubtful, measured_apart, stepwise
from shardproof.harness.running.trials.trial import Trial

Findings = dict[str, Finding]
CONDITIONED = 1e-8
"""Training from the start is well conditioned for a tensor for which control runs of it allow no more than this."""


def rechecked(trial: Trial, evidence: Evidence, checks: Mapping[str, Check], findings: Findings | None = None) -> Found:
    """Findings of these checks, and the evidence with every control run that they came to need.

    `findings`: of the evidence as it is, in float64.
    """
    precision = stated(trial, evidence.run.calls)
    found = as_unseen(trial, _judged(trial, evidence, checks, findings), checks)
    return as_found(trial, found, checks) if precision is None else as_stated(trial, found, checks, precision)


def _judged(trial: Trial, evidence: Evidence, checks: Mapping[str, Check], findings: Findings | None = None) -> Found:
    run = evidence.run
    if run.dtype != "float64":
        truth = stepwise(trial, run, evidence.truth)
        evidence = replace(evidence, truth=with_first_forward(trial, truth) if "truth" in checks else truth)
        findings = None
    findings = findings or examine(evidence, checks)
    wrong = wrong_of(findings)
    if doubtful(trial, run, wrong):
        evidence = replace(evidence, truth=measured_apart(trial, run, evidence.truth))
    truth = evidence.truth
    if truth.controls.states is not None or not wrong or any(in_first_step(measured.name) for measured in wrong):
        return _doubted(trial, evidence, findings, checks)
    stepped = replace(evidence, truth=stepwise(trial, run, truth))
    if stepped.truth.controls.states is None:
        return _doubted(trial, evidence, findings, checks)
    one_step = _doubted(trial, stepped, _again(stepped, findings, checks), checks)
    conditioned = (_conditioned(trial, truth, measured.name) for measured in wrong)
    if wrong_of(one_step[1]) or stepped.truth.controls.adam_bound or not any(conditioned):
        return one_step
    from_start = _doubted(trial, evidence, findings, checks)
    return from_start if any(m.allowed <= CONDITIONED for m in wrong_of(from_start[1])) else one_step


def _conditioned(trial: Trial, truth: Truth, name: str) -> bool:
    """Whether the first control run of training from the start stays near enough for this tensor."""
    control, true = control_run(trial), truth.tensors
    return name in control and CONTROL_FACTOR * distance(control[name], true[name]).frobenius <= CONDITIONED


def _doubted(trial: Trial, evidence: Evidence, findings: dict[str, Finding], checks: Mapping[str, Check]) -> Found:
    """The findings with more control runs, where rounding may explain what is wrong."""
    wrong = wrong_of(findings)
    if not doubtful(trial, evidence.run, wrong):
        return evidence, findings
    evidence = replace(evidence, truth=controlled(trial, evidence.run, evidence.truth, wrong))
    return evidence, _again(evidence, findings, checks)


def _again(evidence: Evidence, findings: Mapping[str, Finding], checks: Mapping[str, Check]) -> dict[str, Finding]:
    """The findings with those that compare numbers made anew; of large tensors those that found something wrong."""
    numbers = {name: checks[name] for name in findings if name in NUMERIC_KINDS or name in LAWS}
    if evidence.truth.controls.distances:
        numbers = {name: check for name, check in numbers.items() if findings[name].wrong}
    return {**findings, **examine(evidence, numbers)}
