"""The check of a dense model of the subject's own: that it is one model in every precision."""

from __future__ import annotations

from harness.checking.evidence import FAIL, PASS, Evidence, Finding, Worst

__all__ = ["truth"]


def truth(evidence: Evidence) -> Finding | None:
    """Whether the first forward of the dense model in float32 is that in float64, but for rounding; None where that was
    not looked at (harness.running.trials.one_function).
    """
    found = evidence.first_forward
    if found is None:
        return None
    worst = Worst(name=found.name, error=found.error, allowed=found.allowed, epsilons=found.epsilons)
    if found.right:
        message = f"the dense model is one function in float32 and in float64; {found.name} came closest to the limit"
        return Finding(verdict=PASS, message=message, worst=worst)
    message = (
        f"the dense model computes another function in float32 than in float64, as {found.name} of its forward shows"
    )
    return Finding(verdict=FAIL, message=message, worst=worst)
