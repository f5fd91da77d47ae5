"""A tensor compared with the truth: its error and its limit in one of three measures (see `tolerance`)."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

MEASURES = ("frobenius", "peak", "scale")
FLOAT64_ALLOWED = 1e-9
SCALE_SHARE = 1e-3
"""A tensor's error is never scaled by less than this share of the rms of all tensors of its kind."""
EXACT = "exact"
ABSOLUTE = "absolute"
"""The measure of errors from a truth of zeros: the largest value, without a unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A tensor compared with the truth, in the measure that came closest to its limit, in ratios and in epsilons.

    `decidable` is False if the limits would admit the tensor times 0.5 or 1.5: then staying within them proves nothing.
    `zero`: the truth is zero but for rounding, so no factor shows on it, while any other value does. `loose` counts the
    elements of which an optimizer may have made more than the limit of `peak`: they are unchecked. A tensor is `right`
    if the error is finite and within its limit. It `overflows` if neither it nor a control run is finite, since every
    program in this dtype may overflow there. It is `wrong` if it is neither. `ratio` is the error in units of its
    limit, at most 1 if right.
    """

    name: str
    measure: str
    error: float
    allowed: float
    epsilons: float
    decidable: bool = True
    loose: int = 0
    elements: int = 0
    zero: bool = False
    right: bool = field(init=False)
    wrong: bool = field(init=False)
    overflows: bool = field(init=False)
    ratio: float = field(init=False)

    def __post_init__(self) -> None:
        right = math.isfinite(self.error) and self.error <= self.allowed
        overflows = math.isinf(self.error) and math.isinf(self.allowed)
        object.__setattr__(self, "right", right)
        object.__setattr__(self, "wrong", not right and not overflows)
        object.__setattr__(self, "overflows", overflows)
        object.__setattr__(self, "ratio", error_ratio(self.error, self.allowed))


def measure_exact(name: str, value: Tensor, truth: Tensor) -> Measured:
    """Compare integers."""
    wrong = 0.0 if torch.equal(value, truth.to(value.dtype)) else math.inf
    return Measured(name=name, measure=EXACT, error=wrong, allowed=0.0, epsilons=wrong)


def error_ratio(error: float, allowed: float) -> float:
    """An error in units of its limit; infinite if the error is not finite, or if it is more than a limit of 0."""
    if not math.isfinite(error):
        return math.inf
    if allowed == 0:
        return 0.0 if error == 0 else math.inf
    return error / allowed


def epsilon(dtype: str) -> float:
    """Machine epsilon of a dtype by its case word ("float32")."""
    return float(torch.finfo(getattr(torch, dtype)).eps)
