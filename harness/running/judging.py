"""The findings of a case, and what is checked again before anything is called wrong."""

from __future__ import annotations

from collections.abc import Mapping

from harness.checking.checks import CHECKS, Check, examine
from harness.checking.evidence import Evidence, Finding
from harness.running.trials.trial import Trial


def judged(
    trial: Trial, evidence: Evidence, checks: Mapping[str, Check] = CHECKS
) -> tuple[Evidence, dict[str, Finding]]:
    """What these checks find, and the evidence with every control run that they came to need. What looks wrong, or is
    in a lower precision, is checked again.
    """
    findings = None
    if evidence.torn or evidence.dtype == "float64":
        findings = examine(evidence, checks)
        if evidence.torn or not any(finding.wrong for finding in findings.values()):
            return evidence, findings
    from harness.running.rechecking import rechecked  # noqa: PLC0415

    return rechecked(trial, evidence, checks, findings)
