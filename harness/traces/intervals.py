"""Stretches of time: when a device did something, and how long it did nothing beside it. Microseconds."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

Stretches = Sequence[tuple[float, float]]


def union(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times without overlaps, in order."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def covered_us(stretches: Stretches, start_us: float, end_us: float) -> float:
    """How much of the time from start to end these cover, which do not overlap and are in order."""
    covered = 0.0
    for place in range(max(bisect_left(stretches, (start_us, 0.0)) - 1, 0), len(stretches)):
        start, end = stretches[place]
        if start >= end_us:
            break
        covered += max(0.0, min(end, end_us) - max(start, start_us))
    return covered


def minus(stretches: Stretches, others: Stretches) -> list[tuple[float, float]]:
    """The times of the first that are in none of the others; neither overlap among themselves, both are in order."""
    left, place = [], 0
    for start, end in stretches:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at, beside = start, place
        while beside < len(others) and others[beside][0] < end:
            if others[beside][0] > at:
                left.append((at, others[beside][0]))
            at = max(at, others[beside][1])
            beside += 1
        if at < end:
            left.append((at, end))
    return left
