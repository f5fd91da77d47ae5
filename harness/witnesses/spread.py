"""Median and interval of measured times, in the unit of the times."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median of some values, and the interval that holds the true median in 95 of 100 such samples.

    With few values the interval spans all of them.
    """

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median and order-statistics interval: distribution-free, from the binomial of n fair coins."""
    ordered, n = sorted(values), len(values)
    tail, cut = 0.0, 0
    while cut < n // 2 and tail + comb(n, cut) / 2**n <= 0.025:
        tail += comb(n, cut) / 2**n
        cut += 1
    first = max(cut - 1, 0)
    return Spread(median=statistics.median(ordered), low=ordered[first], high=ordered[n - 1 - first])
