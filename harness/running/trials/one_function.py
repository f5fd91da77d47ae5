"""Whether a dense model of the subject's own computes one function in every precision, but for rounding.

A dense model that draws its weights in the case's dtype is another model in float32 than in float64: other numbers come
of the same seed. What its control runs are off by is no rounding then, and limits made of it let anything pass.

So the first forward of its float32 run is held against that in float64. Rounding explains the error in theory of as
many operations in a row as there are tensors of parameters, each a sum of as many terms as the longest dim of them has
elements; or LEAP times what a random error in the result of every operator makes, for a model may amplify rounding.
Where a choice falls otherwise (a router's), some rows differ and not most: that says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from harness.checking.evidence import Evidence
from harness.checking.measures.distance import distance, real
from harness.checking.measures.kinds import kind_of, step_of
from harness.checking.measures.summation import ROUNDING
from harness.checking.measures.tolerance import CONTROL_FACTOR, FLOOR_EPSILONS, LEAP, Measured, epsilon
from harness.checking.numeric_checks import NUMERIC_KINDS
from harness.errors import RequestError
from harness.running.trials.trial import Trial
from harness.running.truth.own_truth import OwnTruth
from harness.running.truth.partial_sums import PERTURBED

DTYPE = "float32"
"""What is compared with float64: the roundings of a 16-bit case would hide another function."""
_LATER = {kind for check, kinds in NUMERIC_KINDS.items() if check not in ("forward", "activations") for kind in kinds}
"""Kinds of names that are no numbers of a forward."""
_MANY = 16
"""Elements of a tensor of which some may differ and not most."""


def with_first_forward(trial: Trial, evidence: Evidence) -> Evidence:
    """The same evidence with the tensor of the dense model's first forward that is furthest off in float32.

    As it is for the decoder, and where the dense model has no float32 run, or no forward to compare.
    """
    names = [name for name, tensor in evidence.truth.items() if _of_first_forward(name) and tensor.is_floating_point()]
    if not names or not isinstance(trial.reference.truth, OwnTruth) or evidence.case.dtype == "float64":
        return evidence
    run = evidence.controls[0] if evidence.case.dtype == DTYPE and evidence.controls else _lower(trial, parts=2)
    truth = {name: evidence.truth[name] for name in names if _fits(run, name, evidence.truth)}
    gaps = {name: distance(run[name], truth[name]).frobenius for name in truth if truth[name].any()}
    allowed = dict.fromkeys(
        gaps, max(FLOOR_EPSILONS["peak"] * epsilon(DTYPE), CONTROL_FACTOR * _theory(evidence.truth))
    )
    if any(gaps[name] > allowed[name] for name in gaps):
        other = _lower(trial, parts=PERTURBED)
        for name in gaps:
            between = distance(other[name], run[name]).frobenius if _fits(other, name, truth) else math.inf
            allowed[name] = max(allowed[name], LEAP * between)
    off = [name for name in gaps if gaps[name] > allowed[name]]
    if not gaps or any(not _mostly(run[name], truth[name], allowed[name]) for name in off):
        return evidence
    worst = max(gaps, key=lambda name: gaps[name] / allowed[name])
    unit = epsilon(evidence.case.dtype)
    found = Measured(
        name=worst, measure="frobenius", error=gaps[worst], allowed=allowed[worst], epsilons=gaps[worst] / unit
    )
    return replace(evidence, first_forward=found)


def _of_first_forward(name: str) -> bool:
    kind = kind_of(name)
    return kind not in _LATER and (kind == "act" or step_of(name) == 0)


def _lower(trial: Trial, *, parts: int) -> Mapping[str, Tensor]:
    """A float32 run of the dense model; nothing where it has none."""
    try:
        return trial.computed(trial.reference.control, trial.case.but(dtype=DTYPE), part="control", parts=parts)
    except (RequestError, ValueError):
        return {}


def _fits(run: Mapping[str, Tensor], name: str, truth: Mapping[str, Tensor]) -> bool:
    return name in run and name in truth and run[name].shape == truth[name].shape


def _theory(truth: Mapping[str, Tensor]) -> float:
    """The relative error of as many sums in a row as there are parameters, of as many terms as their longest dim."""
    shapes = [tensor.shape for name, tensor in truth.items() if kind_of(name) in ("grad", "param")]
    names = {name.partition("/")[2] for name in truth if kind_of(name) in ("grad", "param")}
    longest = max((size for shape in shapes for size in shape), default=1)
    return ROUNDING * epsilon(DTYPE) * math.sqrt(max(len(names), 1) * (longest + 1) / 2)


def _mostly(value: Tensor, truth: Tensor, allowed: float) -> bool:
    """Whether most elements are off by more than this, and not only those of some rows."""
    gap, size = (real(value) - real(truth)).abs(), float(real(truth).square().mean().sqrt())
    return truth.numel() < _MANY or float((gap > allowed * size).double().mean()) > 0.5
