"""Many small tensors in float64 compared at once: what `tolerance.measure` finds for each, in a tenth of its time.

Their elements are laid end to end, and sums and maxima are taken segment by segment. What needs more than that is left
out, for `measure`: other dtypes, integers, large or empty tensors, squares that would vanish or overflow, a truth that
is nearly zero beside its kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.checking.measures.distance import BLOCK, SOUND, Distance, groups_of
from harness.checking.measures.kinds import kind_of
from harness.checking.measures.tolerance import FLOAT64_ALLOWED, SCALE_SHARE, Measured, epsilon

_EPSILON = epsilon("float64")
_ALLOWED = Distance(frobenius=FLOAT64_ALLOWED, peak=FLOAT64_ALLOWED, scale=FLOAT64_ALLOWED)


def measured_together(
    values: Mapping[str, Tensor], truth: Mapping[str, Tensor], kinds: Mapping[str, float]
) -> dict[str, Measured]:
    """Name -> how `values` differs from `truth`, for names of both; `kinds` is the rms of each kind of name.

    The limits are those of float64 where nothing more is known of rounding.
    """
    fit = {
        name: truth[name].numel()
        for name, value in values.items()
        if 0 < value.numel() <= BLOCK
        and value.shape == truth[name].shape
        and value.is_floating_point()
        and truth[name].is_floating_point()
    }
    found: dict[str, Measured] = {}
    for names in groups_of(fit):
        x, t = (_end_to_end([tensors[name] for name in names]) for tensors in (values, truth))
        lengths = torch.tensor([fit[name] for name in names], device=x.device)
        gap = x - t
        sums = (_each(gap.abs(), "max", lengths), _each(gap * gap, "mean", lengths), _each(gap * t, "mean", lengths))
        true = (_each(t.abs(), "max", lengths), _each(t * t, "mean", lengths))
        for name, *row in zip(names, *sums, *true, strict=True):
            one = _measured(name, row, kinds.get(kind_of(name), 0.0), fit[name])
            found |= {name: one} if one else {}
    return found


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors])


def _each(numbers: Tensor, what: str, lengths: Tensor) -> list[float]:
    found: list[float] = torch.segment_reduce(numbers, what, lengths=lengths, unsafe=True).tolist()
    return found


def _measured(name: str, row: Sequence[float], kind: float, elements: int) -> Measured | None:
    gap_largest, gap_square, product, largest, square = row
    low, high = SOUND
    if not low < largest < high or not (gap_largest == 0 or low < gap_largest < high):
        return None  # NaN too
    rms = math.sqrt(square)
    if rms < SCALE_SHARE * kind:
        return None
    found = Distance(frobenius=math.sqrt(gap_square) / rms, peak=gap_largest / rms, scale=abs(product / rms / rms))
    _, which = found.worstratio(_ALLOWED)
    error = getattr(found, which)
    return Measured(
        name=name,
        measure=which,
        error=error,
        allowed=getattr(_ALLOWED, which),
        epsilons=error / _EPSILON,
        elements=elements,
    )
