"""Checks of what ranks are compared with: the data that truth and ranks read alike, how many tokens a step counts, and
that a dense model of the subject's own is one model in every precision.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from harness.checking.evidence import FAIL, PASS, Evidence, Finding, Worst
from harness.checking.numeric_checks import numeric

_counts = numeric("tokens")
_SHOWN = 8
"""Elements of a short tensor that a message shows."""


def data(evidence: Evidence) -> Finding | None:
    """Whether the statements about the case's data hold which its reference makes beside the code that reads them.

    Truth and ranks take their batches from the same code, so a mistake in it shows in no comparison of the two. None
    for a reference that states nothing.
    """
    facts = evidence.facts
    if facts is None:
        return None
    broken = [f"{name}: {_told(found, must)}" for name, (found, must) in facts.pairs.items() if not _same(found, must)]
    if broken:
        more = f"; {len(broken) - 1} more of {len(facts.pairs)} statements are wrong" if len(broken) > 1 else ""
        message = f"the data are wrong for truth and ranks alike: {broken[0]}{more}"
        return Finding(verdict=FAIL, message=message, unchecked=facts.unchecked, phase="data")
    message = f"{len(facts.pairs)} statements about the data hold; {facts.reading}"
    return Finding(verdict=PASS, message=message, unchecked=facts.unchecked)


def tokens(evidence: Evidence) -> Finding | None:
    """Whether every step counts as many tokens as the dense model, exactly: the number that its mean divides by."""
    finding = _counts(evidence)
    if finding is None or finding.verdict != FAIL or finding.worst is None:
        return finding
    name = finding.worst.name
    counted, must = (int(tensors[name]) for tensors in (evidence.merged.tensors, evidence.truth))
    return replace(finding, message=f"{name} is {counted}, and the dense model counts {must}")


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
    message = "the dense model computes another function in float32 than in float64"
    return Finding(verdict=FAIL, message=f"{message}, as {found.name} of its forward shows", worst=worst)


def _same(found: Tensor, must: Tensor) -> bool:
    return found.shape == must.shape and bool((found == must).all())


def _told(found: Tensor, must: Tensor) -> str:
    """Both in full when they are short; else where they differ."""
    if max(found.numel(), must.numel()) <= _SHOWN or found.shape != must.shape:
        return f"{_start(found)}, must be {_start(must)}"
    wrong = (found != must).flatten()
    at = int(wrong.int().argmax())
    values = (int(tensor.flatten()[at]) for tensor in (found, must))
    return (
        "element {} is {}, must be {}".format(at, *values) + f"; {int(wrong.sum())} of {must.numel()} elements differ"
    )


def _start(tensor: Tensor) -> str:
    values = tensor.flatten().tolist()
    shown = f"{values[:_SHOWN]}"[:-1] + (", ...]" if len(values) > _SHOWN else "]")
    return shown if tensor.dim() else str(tensor.item())
