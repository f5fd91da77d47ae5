"""How far one tensor is from another in three measures, in float64 (`harness.checking.tolerance` says which)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MEASURES", "Distance", "Truth", "distance", "distance_from", "ratio", "real"]

MEASURES = ("frobenius", "peak", "scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far a tensor is from the truth in every measure; infinite when either holds NaN or infinity."""

    frobenius: float
    peak: float
    scale: float = 0.0

    def worstratio(self, allowed: Distance) -> tuple[float, str]:
        """The largest of error / allowed, and which measure it is."""
        ratios = {name: ratio(getattr(self, name), getattr(allowed, name)) for name in MEASURES}
        name = max(ratios, key=ratios.__getitem__)
        return ratios[name], name


def ratio(error: float, allowed: float) -> float:
    """An error in units of what is allowed; infinite where it is not finite, or where 0 is allowed and missed."""
    if not math.isfinite(error):
        return math.inf
    if allowed == 0:
        return 0.0 if error == 0 else math.inf
    return error / allowed


def distance(
    value: Tensor, truth: Tensor, least: float = 0.0, own: float = 0.0, slack: Tensor | None = None
) -> Distance:
    """How far `value` is from `truth` (same shape), scaled by the truth's rms or `least` if that is larger.

    `peak` is that of the elements which are off by more than the share `own` of themselves, 0 when there are none.
    `slack`, of the same shape, is taken off the error of every element before anything is measured.
    A truth that is zero throughout, with no larger scale given, allows zero only. Empty tensors are equal.
    """
    return distance_from(value, Truth.of(truth), least, own, slack)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """A truth in float64, with what several comparisons need of it: its largest element and its rms."""

    numbers: Tensor
    largest: float
    rms: float

    @classmethod
    def of(cls, truth: Tensor) -> Truth:
        """What is needed of this truth."""
        numbers = real(truth)
        largest = _largest(numbers)
        return cls(numbers=numbers, largest=largest, rms=_rms(numbers, largest))


def distance_from(value: Tensor, true: Truth, least: float, own: float = 0.0, slack: Tensor | None = None) -> Distance:
    """The same for a truth that several values are compared with."""
    t, rms = true.numbers, true.rms
    if t.numel() == 0:
        return Distance(frobenius=0.0, peak=0.0)
    x = real(value)
    if not math.isfinite(_largest(x)) or not math.isfinite(true.largest):
        return Distance(frobenius=math.inf, peak=math.inf, scale=math.inf)
    gap = x - t
    if slack is not None:
        gap = gap.sign() * (gap.abs() - slack.double()).clamp_min(0.0)
    scale = max(rms, least)
    if scale == 0:
        wrong = math.inf if bool(gap.any()) else 0.0
        return Distance(frobenius=wrong, peak=wrong, scale=wrong)
    size = gap.abs()
    largest = float(size.max())
    outside = largest if own == 0 else float(size.masked_fill(size <= own * t.abs(), 0.0).max())
    along = abs(float(((gap / scale) * (t / rms)).mean())) if rms > 0 else 0.0
    return Distance(frobenius=_rms(gap, largest) / scale, peak=outside / scale, scale=along)


def real(tensor: Tensor) -> Tensor:
    """The numbers in float64, complex ones as pairs."""
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()


def _largest(tensor: Tensor) -> float:
    """The largest absolute value: NaN where there is a NaN, 0 of no elements."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _rms(tensor: Tensor, largest: float) -> float:
    # Scaled by the largest element first: squares of tiny or huge numbers must neither vanish nor overflow.
    return largest * math.sqrt(float((tensor / largest).square().mean())) if largest > 0 else 0.0
