"""How far one tensor is from another in three measures, in float64 (`tolerance` says which)."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardproof.harness.checking.measures.many_tensors import (
    BLOCK,
    LARGEST,
    SOUND,
    Numbers,
    blocks_of,
    largest_of,
    whole_of,
)
from shardproof.harness.checking.measures.measured import MEASURES, error_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far a tensor is from the truth in every measure; infinite if there is a NaN, or their infinities differ."""

    frobenius: float
    peak: float
    scale: float = 0.0

    def times(self, factor: float) -> "Distance":
        """The distance in every measure, multiplied by this factor."""
        return Distance(**{name: factor * getattr(self, name) for name in MEASURES})

    def worstratio(self, allowed: "Distance") -> tuple[float, str]:
        """The largest of error / allowed, and its measure."""
        ratios = {name: error_ratio(getattr(self, name), getattr(allowed, name)) for name in MEASURES}
        name = max(ratios, key=ratios.__getitem__)
        return ratios[name], name


def distance(
    value: Numbers, truth: Numbers, least: float = 0.0, own: float = 0.0, slack: Numbers | None = None
) -> Distance:
    """How far `value` is from `truth` (same shape), scaled by the truth's rms, or by `least` if that is larger.

    `peak` counts only elements that are off by more than the share `own` of themselves; 0 when there are none.
    `slack`, of the same shape, is taken off the error of every element before anything is measured.
    If the truth is zero throughout and `least` is 0, only zeros are right. If an element of the truth is infinite, such
    as a masked logit, the value must be the same infinity there, and the rest is measured. The largest number of a
    dtype masks as an infinity does. Empty tensors are equal.
    """
    return distance_from(value, TruthTensor.of(truth), least, own, slack)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthTensor:
    """A truth, and what several comparisons need of it in float64: the largest and the rms of its finite elements, and
    whether it has infinite ones too. With a NaN no element is left out, and the largest is NaN.
    """

    numbers: Numbers
    largest: float
    rms: float
    infinite: bool = False

    @classmethod
    def of(cls, truth: Numbers) -> "TruthTensor":
        """Measures of this truth that comparisons need."""
        if truth.numel() > BLOCK:
            sums = _Sums()
            for block in blocks_of(truth):
                sums.add(as_float64(block))
            if sums.sound or sums.largest == 0:
                return cls(numbers=truth, largest=sums.largest, rms=sums.rms)
        numbers = _open_masks(as_float64(whole_of(truth)))
        infinite = bool(numbers.isinf().any()) and not bool(numbers.isnan().any())
        numbers = numbers[numbers.isfinite()] if infinite else numbers
        largest = largest_of(numbers)
        return cls(numbers=truth, largest=largest, rms=_root_mean_square(numbers, largest), infinite=infinite)


def distance_from(
    value: Numbers, true: TruthTensor, least: float, own: float = 0.0, slack: Numbers | None = None, factor: float = 1.0
) -> Distance:
    """The distance of `factor` times the value.

    A large tensor is read once, in blocks, so that no temporary has its size.
    """
    if true.numbers.numel() == 0:
        return Distance(frobenius=0.0, peak=0.0)
    in_blocks = true.numbers.numel() > BLOCK and not true.infinite
    found = _in_blocks(value, true, least, own, slack, factor) if in_blocks else None
    return found or _at_once(value, true, least, own, slack, factor)


def _at_once(
    value: Numbers, true: TruthTensor, least: float, own: float, slack: Numbers | None, factor: float
) -> Distance:
    t, rms = as_float64(whole_of(true.numbers)), true.rms
    x, loose = factor * as_float64(whole_of(value)), None if slack is None else whole_of(slack)
    if true.infinite:
        alike = torch.equal(x.isinf(), t.isinf())
        x, t = _open_masks(x), _open_masks(t)
        kept = t.isfinite()
        if not alike or not torch.equal(x[~kept], t[~kept]):
            return Distance(frobenius=math.inf, peak=math.inf, scale=math.inf)
        x, t, loose = x[kept], t[kept], None if loose is None else loose[kept]
    if not math.isfinite(largest_of(x)) or not math.isfinite(true.largest):
        return Distance(frobenius=math.inf, peak=math.inf, scale=math.inf)
    if t.numel() == 0:
        return Distance(frobenius=0.0, peak=0.0)
    gap = _largest_gap(x, t, loose)
    scale = max(rms, least)
    if scale == 0:
        wrong = math.inf if bool(gap.any()) else 0.0
        return Distance(frobenius=wrong, peak=wrong, scale=wrong)
    size = gap.abs()
    largest = float(size.max())
    outside = largest if own == 0 else float(size.masked_fill(size <= own * t.abs(), 0.0).max())
    along = abs(float(((gap / scale) * (t / rms)).mean())) if rms > 0 else 0.0
    return Distance(frobenius=_root_mean_square(gap, largest) / scale, peak=outside / scale, scale=along)


def _in_blocks(
    value: Numbers, true: TruthTensor, least: float, own: float, slack: Numbers | None, factor: float
) -> Distance | None:
    """The distance by sums over blocks; None if squares or a scale would underflow or overflow."""
    scale, sums, outside, along = max(true.rms, least), _Sums(), 0.0, 0.0
    slacks: Iterable[Tensor | None] = blocks_of(slack) if slack is not None else itertools.repeat(None)
    for here, there, loose in zip(blocks_of(value), map(as_float64, blocks_of(true.numbers)), slacks, strict=False):
        gap = _largest_gap(as_float64(here) if factor == 1 else factor * as_float64(here), there, loose)
        largest = sums.add(gap)
        along += float(gap.reshape(-1).dot(there.reshape(-1)))
        if own and largest > outside:
            size = gap.abs_()
            outside = max(outside, float(size.masked_fill_(size <= own * there.abs(), 0.0).max()))
    if sums.largest == 0:
        return Distance(frobenius=0.0, peak=0.0)
    if not sums.sound or not math.isfinite(true.largest) or scale == 0 or true.rms == 0:
        return None
    return Distance(
        frobenius=sums.rms / scale,
        peak=(outside if own else sums.largest) / scale,
        scale=abs(along / sums.count / scale / true.rms),
    )


def _largest_gap(x: Tensor, t: Tensor, slack: Tensor | None) -> Tensor:
    gap = x - t
    return gap if slack is None else gap.sign() * (gap.abs() - slack.double()).clamp_min_(0.0)


class _Sums:
    """The largest absolute value and the rms of numbers that come in blocks."""

    def __init__(self) -> None:
        self.largest, self.count, self._squares = 0.0, 0, 0.0

    def add(self, numbers: Tensor) -> float:
        """Add a block. Returns its largest absolute value."""
        flat = numbers.reshape(-1)
        low, high = flat.aminmax()
        largest = max(-float(low), float(high))
        self.largest = math.nan if math.isnan(largest) else max(self.largest, largest)
        self.count += flat.numel()
        self._squares += float(flat.dot(flat))
        return largest

    @property
    def sound(self) -> bool:
        """Whether the square of no number underflows or overflows."""
        return SOUND[0] < self.largest < SOUND[1]

    @property
    def rms(self) -> float:
        """The root of the mean square."""
        return math.sqrt(self._squares / self.count)


def _open_masks(numbers: Tensor) -> Tensor:
    """The numbers, an infinity in the place of each largest number of a dtype: both are masks."""
    if not largest_of(numbers) >= min(LARGEST):  # NaN is no mask
        return numbers
    masked = torch.isin(numbers.abs(), torch.tensor(sorted(LARGEST), dtype=numbers.dtype, device=numbers.device))
    return torch.where(masked, numbers.sign() * math.inf, numbers)


def as_float64(tensor: Tensor) -> Tensor:
    """The numbers in float64; complex ones as pairs."""
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()


def _root_mean_square(tensor: Tensor, largest: float) -> float:
    # Scaled by the largest element first, so that no square underflows or overflows.
    return largest * math.sqrt(float((tensor / largest).square().mean())) if largest > 0 else 0.0
