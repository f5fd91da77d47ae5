"""Exact tests of counts: how improbable what was counted is, if masks are what they claim to be.

Two-sided, each the smaller tail doubled, and summed term by term from the distribution itself: no normal approximation.
`ALARM` is the probability with which a check of a right program fails at all: it is shared out among its tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable

ALARM = 1e-9
_NEGLIGIBLE = 1e-17
"""A term of a tail this small beside the sum so far ends it: terms only fall."""


def binomial(count: int, trials: int, probability: float) -> float:
    """How probable a count at least as far out is among independent trials of this probability."""
    if not 0 < probability < 1:
        return float(count == trials * probability)

    def log_term(k: int) -> float:
        chance = k * math.log(probability) + (trials - k) * math.log1p(-probability)
        return _log_choose(trials, k) + chance

    return _two_sided(count, 0, trials, log_term)


def hypergeometric(both: int, total: int, first: int, second: int) -> float:
    """How probable an overlap at least as far out is between two independent sets, of `first` and of `second` out of
    `total` elements: Fisher's exact test.
    """

    def log_term(k: int) -> float:
        return _log_choose(first, k) + _log_choose(total - first, second - k) - _log_choose(total, second)

    return _two_sided(both, max(0, first + second - total), min(first, second), log_term)


def _two_sided(count: int, least: int, most: int, log_term: Callable[[int], float]) -> float:
    below = _tail(count, -1, least, log_term)
    above = _tail(count, 1, most, log_term)
    return min(1.0, 2 * min(below, above))


def _tail(start: int, way: int, end: int, log_term: Callable[[int], float]) -> float:
    """The sum of the terms from `start` to `end`, this way; 1 where it has passed half of everything."""
    total, before = 0.0, -1.0
    for k in range(start, end + way, way):
        term = math.exp(log_term(k))
        total += term
        if total > 0.5:
            return 1.0
        if term <= before and term <= _NEGLIGIBLE * total:
            break
        before = term
    return total


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
