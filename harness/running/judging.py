"""Findings of a run's checks: what looks wrong is compared again beside control runs before it is called wrong."""

from collections.abc import Mapping

from shardproof.harness.checking.checks import CHECKS, Check, examine, needing
from shardproof.harness.checking.evidence import Finding
from shardproof.harness.checking.records import Evidence, Truth
from shardproof.harness.running.trials.trial import Trial


def judged(
    trial: Trial, evidence: Evidence, checks: Mapping[str, Check] = CHECKS
) -> tuple[Evidence, dict[str, Finding]]:
    """Findings of these checks, and the evidence with the control runs that they needed.

    Tensors that look wrong, or are in a lower precision, are compared again beside control runs of the dense model.
    These show how far rounding alone takes a right result.
    """
    findings = None
    if not needing(checks, Truth):
        return evidence, examine(evidence, checks)
    if evidence.truth.unmergeable or evidence.run.dtype == "float64":
        findings = examine(evidence, checks)
        if evidence.truth.unmergeable or not any(finding.wrong for finding in findings.values()):
            return evidence, findings
    from shardproof.harness.running.trials.rechecking import rechecked  # noqa: PLC0415

    return rechecked(trial, evidence, checks, findings)
