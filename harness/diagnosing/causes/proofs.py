"""Predictions of a cause for the tensors that it affects, and whether their numbers agree.

A prediction holds if it explains the error: what is left is small beside the error, not just beside the truth. The
tensors of one prediction have one shape; values of several ranks are concatenated.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

SINGLE = 1e-4
"""A guess explains a single number only within this relative error, since it may be near by chance."""
_LEFT = {torch.float64: 1e-6, torch.float32: 1e-3}
"""The share of the error that a pattern may leave. Rounding leaves more in shorter dtypes."""
_LEFT_IN_SHORT = 3e-2
DRIFT = 64
"""Replicas within this many machine epsilons of the truth differ in their last bits only."""
_ROUNDINGS = 16
"""A rounded tensor differs from the truth by at most this many epsilons of the shorter dtype."""
FEWEST_OF_A_FACTOR = 4
"""The fewest independent elements that show a factor, since any single number is a multiple of the right one."""
FEWEST = 8
"""The fewest nonzero elements that do not fit a shorter dtype by chance."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Explained:
    """A wrong `value` is `guess`, and not the truth.

    `names` are the tensors that have these values, and `fitted` is how many numbers the guess takes from them. `left`
    is the share of the error that the guess may leave, by default that of rounding in the value's dtype.
    """

    value: Tensor
    truth: Tensor
    guess: Tensor
    left: float | None = None
    names: tuple[str, ...] = ()
    fitted: int = 0

    @property
    def holds(self) -> bool:
        """Whether nearly all of the error is explained."""
        share = share_left(self.value) if self.left is None else self.left
        x, t, guess = (tensor.double() for tensor in (self.value, self.truth, self.guess))
        error, left = float((x - t).norm()), float((x - guess).norm())
        if t.numel() == 1 and left > SINGLE * abs(float(guess)):
            return False
        return 0 < error < math.inf and left <= share * error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounded:
    """A wrong `value` fits the dtype `short` in all elements, and is close to the truth, which does not fit.
    Rounding errors are nearly orthogonal to the truth, and the error of a wrong factor is not.
    """

    value: Tensor
    truth: Tensor
    short: torch.dtype
    names: tuple[str, ...] = ()
    fitted: ClassVar[int] = 0

    @property
    def holds(self) -> bool:
        """Whether the value fits `short`, the truth does not, and the error is that of rounding."""
        x, t, eps = self.value.double(), self.truth.double(), torch.finfo(self.short).eps
        if x.shape != t.shape or int((x != 0).sum()) < FEWEST or not bool(torch.isfinite(x).all()):
            return False
        if not self.value.is_floating_point() or eps <= torch.finfo(self.value.dtype).eps:
            return False
        fits, needed = (bool((y.to(self.short).double() == y).all()) for y in (x, t))
        error, power = (x - t).flatten(), float(t.norm())
        along = abs(float(error @ t.flatten()))
        return fits and not needed and float(error.norm()) <= _ROUNDINGS * eps * power and along <= eps * power**2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Near:
    """The `value` of one replica is the truth but for its last bits, relative to `size`, the tensor's largest value."""

    value: Tensor
    truth: Tensor
    size: float
    names: tuple[str, ...] = ()
    fitted: ClassVar[int] = 0

    @property
    def holds(self) -> bool:
        """Whether the value is the truth but for its last bits."""
        same_shape = self.size > 0 and self.value.shape == self.truth.shape
        gap = (self.value.double() - self.truth.double()).abs()
        return same_shape and float(gap.max()) <= last_bits(self.value) * self.size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NotFinite:
    """A `value` is NaN or infinite somewhere, and the truth nowhere."""

    value: Tensor
    truth: Tensor
    names: tuple[str, ...] = ()
    fitted: ClassVar[int] = 0

    @property
    def holds(self) -> bool:
        """Whether the value is not finite and the truth is."""
        return not bool(torch.isfinite(self.value).all()) and bool(torch.isfinite(self.truth).all())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """Exact evidence of a cause, without a number: a call, a flaw of a layout, a check's finding, an exception."""

    what: object
    names: ClassVar[tuple[str, ...]] = ()
    fitted: ClassVar[int] = 0

    @property
    def holds(self) -> bool:
        """Whether there is such a thing."""
        return self.what is not None


Proof = Explained | Rounded | Near | NotFinite | Seen


def last_bits(value: Tensor) -> float:
    """The share of its largest value by which the last bits of a tensor differ, by its dtype; 0 for integers."""
    return min(DRIFT * torch.finfo(value.dtype).eps, SINGLE) if value.is_floating_point() else 0.0


def share_left(value: Tensor) -> float:
    """The share of the error that an explanation of this value may leave, by its dtype."""
    return _LEFT.get(value.dtype, _LEFT_IN_SHORT if value.is_floating_point() else _LEFT[torch.float64])


def is_explained_by(guess: Tensor, value: Tensor, truth: Tensor) -> bool:
    """Whether `guess` explains the wrong `value`: nearly nothing of the error is left."""
    return Explained(value=value, truth=truth, guess=guess).holds


def count_independent(truths: Iterable[Tensor]) -> int:
    """Elements of these tensors that show a factor independently, without zeros and repeats of others."""
    return sum(len(t.double()[t != 0].abs().unique()) for t in truths)


def as_tensor(value: float) -> Tensor:
    """A number as a tensor, for comparisons."""
    return torch.tensor(value, dtype=torch.float64)
