"""Explanations of a failed case: further runs and what-ifs; then the diagnosis and six lines of every failed check."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from harness.checking.checks import examine
from harness.checking.evidence import FAIL, Evidence, Finding
from harness.diagnosing.diagnosis import Diagnosis, diagnose, explanation_of
from harness.diagnosing.other_sizes import of_other_sizes
from harness.diagnosing.six_lines import tell
from harness.running.locating.drawn import with_drawn_numbers
from harness.running.locating.wrong_module import with_wrong_module
from harness.running.trials.explained import elsewhere, with_what_ifs
from harness.running.trials.trial import Trial
from harness.running.trials.watched import watched


def with_explanations(
    trial: Trial, evidence: Evidence, findings: Mapping[str, Finding], *, watch: bool
) -> tuple[Evidence, Mapping[str, Finding]]:
    """The evidence with what explains these findings, and all findings by which a failure is explained.

    `watch`: activations, which show the first wrong place, were not captured before.
    """
    evidence = watched(trial, evidence) if watch else evidence
    with trial.timed("checks"):
        context = {**examine(evidence), **findings}
    wrong = {name for finding in context.values() if finding.verdict == FAIL for name in finding.names}
    evidence = with_drawn_numbers(trial, with_what_ifs(trial, evidence, wrong), wrong)
    evidence = with_wrong_module(trial, evidence, wrong)
    return _with_other_sizes(trial, evidence, context), context


def _with_other_sizes(trial: Trial, evidence: Evidence, findings: Mapping[str, Finding]) -> Evidence:
    """Evidence with that of one case for each size that a wrong factor equals and that is another there."""
    try:
        shared = explanation_of(evidence, findings)
    except Exception:  # the diagnosis of every check will say why
        return evidence
    sizes = tuple(dict.fromkeys(size for cause in shared.causes for size in cause.follows))
    first, others = shared.first.name, []
    for cases in of_other_sizes(evidence.case, sizes, shared.first.name):
        others += list(islice((seen for case in cases if (seen := elsewhere(trial, case, first))), 1))
    return replace(evidence, others=tuple(others))


def diagnosed(
    evidence: Evidence, findings: Mapping[str, Finding], context: Mapping[str, Finding], subject: str, options: str
) -> tuple[dict[str, Diagnosis], dict[str, str]]:
    """Every failed check -> its diagnosis, and -> its message. A failure that cannot be explained stays one."""
    diagnoses: dict[str, Diagnosis] = {}
    messages: dict[str, str] = {}
    shared = None
    every = {**context, **findings}
    for check, finding in findings.items():
        if finding.verdict == FAIL:
            try:
                shared = shared or explanation_of(evidence, every)
                diagnosis = diagnose(evidence, every, check, shared)
            except Exception as problem:
                messages[check] = f"{finding.message} (its diagnosis failed: {type(problem).__name__}: {problem})"
            else:
                messages[check] = tell(diagnosis, finding, evidence, subject, options)
                diagnoses[check] = diagnosis
    return diagnoses, messages
