"""Whether a cause leaves no more of a wrong tensor than its check allows: the last word before it is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from harness.checking.evidence import Evidence
from harness.checking.measures.tolerance import kind_of, kind_rms
from harness.checking.numeric_checks import held
from harness.diagnosing.rules.causes import Cause
from harness.diagnosing.rules.proofs import Explained
from harness.outcome.merging import Merged

__all__ = ["within_limits"]


def within_limits(evidence: Evidence, causes: Iterable[Cause]) -> list[Cause]:
    """Those of these causes whose predictions of merged tensors are as near as the truth would have to be."""
    return [cause for cause in causes if all(_allowed(evidence, p) for p in cause.proof if isinstance(p, Explained))]


def _allowed(evidence: Evidence, proof: Explained) -> bool:
    """Whether the tensor would pass with what the prediction leaves of it as its error."""
    tensors = evidence.merged.tensors
    name = next((name for name, tensor in tensors.items() if tensor is proof.value), "")
    if not name:
        return True  # of one rank's part, or of a step's movement: its rule has a limit of its own
    truth, guess = evidence.truth[name].double(), proof.guess.double()
    size = float(truth.norm())
    scale = max(1.0, float(guess.norm()) / size) if size else 1.0
    corrected = truth + (proof.value.double() - guess) / scale
    merged = Merged(tensors={**tensors, name: corrected.to(proof.value.dtype)}, flaws=evidence.merged.flaws)
    alike = {other: tensor for other, tensor in evidence.truth.items() if kind_of(other) == kind_of(name)}
    return held(replace(evidence, merged=merged), name, kind_rms(alike).get(kind_of(name), 0.0)).right
