"""How far a right result may be from the truth, and how far this one is.

Two measures, both must hold: `frobenius` = |x - t| / |t| over the whole tensor, which sees diffuse errors, and `peak` =
max|x - t| / rms(t), which sees one wrong row in a big tensor. An element that is right to OWN_EPSILONS of its own size
is right, however far it stands out: the gradient of a logit is that of one token among thousands. Errors are plain
ratios; `epsilons` counts them in the machine epsilon of the run dtype. Integers and booleans are compared exactly.

float64: 1e-9 for both (noise stays near 1e-13, the smallest known bugs near 1e-2). Other dtypes: a control run, the
dense model in the run dtype with its sums in another order, shows how far rounding alone carries a right result.
Allowed is CONTROL_FACTOR times the worst control run, never less than the stated floor in epsilons. Where this reaches
the CEILING, a tensor within it proves nothing, and `decidable` says so. In float64 control runs are asked only beyond
1e-9: training that leaps about doubles its noise in every step. One control run may be lucky (a relu that flips,
an update that amplifies), so whoever finds an error beyond the limit runs more of them before calling it one, and asks
the dense model what a relu's kink may change; that is added to the limit as it is, for it is a bound and no sample.
Sources: TTrace (errors in epsilons), control runs as in DeepSpeedExamples #1008.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "CEILING",
    "CONTROL_FACTOR",
    "EXACT",
    "FLOOR_EPSILONS",
    "FLOAT64_ALLOWED",
    "FLOAT64_CEILING",
    "OWN_EPSILONS",
    "Distance",
    "Measured",
    "distance",
    "epsilon",
    "kind_of",
    "kind_rms",
    "least_rms",
    "measure",
    "own_share",
]

FLOAT64_ALLOWED = 1e-9
FLOOR_EPSILONS: Mapping[str, float] = {"frobenius": 4.0, "peak": 32.0}
"""Below this many epsilons of the run dtype nobody is asked to stay, however lucky the control run was."""
FLOAT64_CEILING = 1e-4
"""Where noise may come to this in float64, training amplifies it without end, and later steps tell nothing."""
OWN_EPSILONS = 4.0
"""An element this many epsilons of the run dtype from its own truth is none that `peak` looks at; none in float64."""
CONTROL_FACTOR = 6.0
"""A right result may be this many times further from the truth than the worst control run."""
CEILING = 0.5
"""Half of the tensor: a limit as wide as this would let through a missing half of a sum."""
SCALE_SHARE = 1e-3
"""A tensor's error is never scaled by less than this share of the rms of all tensors of its kind."""
ZERO_SHARE = 1e-10
"""A truth below this share of its kind's rms is zero but for rounding, and its error is scaled by the kind's rms."""
EXACT = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far a tensor is from the truth in both measures; infinite when either holds NaN or infinity."""

    frobenius: float
    peak: float

    def worst_ratio(self, allowed: Distance) -> tuple[float, str]:
        """The larger of error / allowed, and which measure it is."""
        ratios = {name: _ratio(getattr(self, name), getattr(allowed, name)) for name in ("frobenius", "peak")}
        name = max(ratios, key=lambda key: ratios[key])
        return ratios[name], name


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One tensor held against the truth: the measure that came closest to its limit, in ratios and in epsilons.

    `decidable` is False when rounding alone may explain an error as large as CEILING: staying within proves nothing.
    """

    name: str
    measure: str
    error: float
    allowed: float
    epsilons: float
    decidable: bool = True

    @property
    def right(self) -> bool:
        """Whether the error is finite and within what is allowed."""
        return math.isfinite(self.error) and self.error <= self.allowed

    @property
    def ratio(self) -> float:
        """Error in units of what is allowed: at most 1 when right."""
        return _ratio(self.error, self.allowed)


def _ratio(error: float, allowed: float) -> float:
    if not math.isfinite(error):
        return math.inf
    if allowed == 0:
        return 0.0 if error == 0 else math.inf
    return error / allowed


def epsilon(dtype: str) -> float:
    """Machine epsilon of a dtype by its case word ("float32")."""
    return float(torch.finfo(getattr(torch, dtype)).eps)


def kind_of(name: str) -> str:
    """The kind of an outcome name: "grad" of "grad/layers.0.mlp.w1.weight"."""
    return name.partition("/")[0]


def kind_rms(truth: Mapping[str, Tensor]) -> dict[str, float]:
    """The rms over all tensors of each kind of name ("grad", "act", ...); tensors that are not finite do not count."""
    squares: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, tensor in truth.items():
        if tensor.is_floating_point() and bool(torch.isfinite(tensor).all()):
            kind = kind_of(name)
            squares[kind] = squares.get(kind, 0.0) + float(tensor.double().square().sum())
            counts[kind] = counts.get(kind, 0) + tensor.numel()
    return {kind: math.sqrt(squares[kind] / max(counts[kind], 1)) for kind in squares}


def least_rms(truth: Tensor, kind: float) -> float:
    """The smallest rms to scale this tensor's error by, from the rms of its kind.

    The gradient of a key bias is zero in mathematics: what rounding leaves of its terms is an error of 100 % relative
    to itself, and a tiny one relative to the gradients that its terms are made of.
    """
    return kind if _rms(_real(truth)) < ZERO_SHARE * kind else SCALE_SHARE * kind


def own_share(dtype: str) -> float:
    """The share of its own size by which an element may be off in this dtype before `peak` looks at it."""
    return 0.0 if dtype == "float64" else OWN_EPSILONS * epsilon(dtype)


def distance(value: Tensor, truth: Tensor, least: float = 0.0, own: float = 0.0) -> Distance:
    """How far `value` is from `truth` (same shape), scaled by the truth's rms or `least` if that is larger.

    `peak` is that of the elements which are off by more than the share `own` of themselves, 0 when there are none.
    A truth that is zero throughout, with no larger scale given, allows zero only. Empty tensors are equal.
    """
    if truth.numel() == 0:
        return Distance(frobenius=0.0, peak=0.0)
    x, t = _real(value), _real(truth)
    if not bool(torch.isfinite(x).all()) or not bool(torch.isfinite(t).all()):
        return Distance(frobenius=math.inf, peak=math.inf)
    gap = x - t
    scale = max(_rms(t), least)
    if scale == 0:
        wrong = math.inf if bool(gap.any()) else 0.0
        return Distance(frobenius=wrong, peak=wrong)
    outside = gap.abs().masked_fill(gap.abs() <= own * t.abs(), 0.0)
    return Distance(frobenius=_rms(gap) / scale, peak=float(outside.max()) / scale)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()


def _rms(tensor: Tensor) -> float:
    # Scaled by the largest element first: squares of tiny or huge numbers must neither vanish nor overflow.
    largest = float(tensor.abs().max())
    return largest * math.sqrt(float((tensor / largest).square().mean())) if largest > 0 else 0.0


def measure(
    name: str,
    value: Tensor,
    truth: Tensor,
    *,
    dtype: str,
    controls: Sequence[Tensor] = (),
    kinks: Sequence[Tensor] = (),
    kind: float = 0.0,
) -> Measured:
    """Hold one tensor against the truth (same shape) as the run dtype allows; `kind` is the rms of its kind.

    `kinks`: what a relu within rounding of zero may change, a tensor of the same shape each.
    """
    if not truth.is_floating_point() and not truth.is_complex():
        wrong = 0.0 if torch.equal(value, truth.to(value.dtype)) else math.inf
        return Measured(name=name, measure=EXACT, error=wrong, allowed=0.0, epsilons=wrong)
    least = least_rms(truth, kind) if bool(torch.isfinite(truth).all()) else 0.0
    found = distance(value, truth, least, own_share(dtype))
    allowed, decidable = _allowed(dtype, truth, controls, kinks, least)
    _, which = found.worst_ratio(allowed)
    error, limit = getattr(found, which), getattr(allowed, which)
    return Measured(
        name=name,
        measure=which,
        error=error,
        allowed=limit,
        epsilons=error / epsilon(dtype),
        decidable=decidable,
    )


def _allowed(
    dtype: str, truth: Tensor, controls: Sequence[Tensor], kinks: Sequence[Tensor], least: float
) -> tuple[Distance, bool]:
    """What the run dtype allows for this tensor, and whether anything can be decided within it."""
    honest = [distance(control, truth, least) for control in controls]
    limits = {
        name: max([_floor(dtype, name), *(CONTROL_FACTOR * getattr(run, name) for run in honest)])
        for name in ("frobenius", "peak")
    }
    moved = [distance(truth + kink, truth, least) for kink in kinks]
    limits = {name: limit + max([getattr(run, name) for run in moved], default=0.0) for name, limit in limits.items()}
    return Distance(**limits), limits["frobenius"] < (FLOAT64_CEILING if dtype == "float64" else CEILING)


def _floor(dtype: str, measure_: str) -> float:
    return FLOAT64_ALLOWED if dtype == "float64" else FLOOR_EPSILONS[measure_] * epsilon(dtype)
