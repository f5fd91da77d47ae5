"""How much slower: bootstrap intervals of the ratio of medians, phase by phase.

A shared machine may run everything at half speed for a minute. So a phase is timed relative to another one in the same
micro-batch: the one with the median change of all others, which the change of a single phase cannot move. The ratio by
the clock is given too. Times are microseconds; ratios are new over base. Equal input gives equal intervals: the
resampling is seeded.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import pandas as pd
from numpy.typing import NDArray

CONFIDENCE = 0.999
"""The confidence of every interval. By chance one in seventy comparisons of thirty phases finds one slower; far fewer
find one slower by 10 %.
"""
FEWEST = 4
"""The fewest micro-batches that give an interval."""
_RESAMPLES = 4000
_MOST = 500
"""The most micro-batches that are resampled. If there are more, this many evenly spaced ones are."""
_MEASURES = {"elapsed": "elapsed_us", "in calls": "in_calls_us"}
_BLOCK = ["case", "step", "microbatch"]
Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A ratio and where it lies with CONFIDENCE; NaN where nothing can be said."""

    ratio: float
    low: float
    high: float


_UNKNOWN = Interval(ratio=math.nan, low=math.nan, high=math.nan)


def ratio_of_medians(base: Times, new: Times, seed: int = 0) -> Interval:
    """median(new) / median(base) of paired times, by resampling the pairs.

    Percentiles of few resampled medians are too narrow. They are widened by Student's t over the normal distribution.
    """
    count = len(base)
    if count < FEWEST or count != len(new) or np.median(base) <= 0 or np.median(new) <= 0:
        return _UNKNOWN
    middle = math.log(np.median(new)) - math.log(np.median(base))
    if count > _MOST:
        kept = np.linspace(0, count - 1, _MOST).astype(int)
        base, new, count = base[kept], new[kept], _MOST
    draws = np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.median(new[draws], axis=1)) - np.log(np.median(base[draws], axis=1))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(logs[np.isfinite(logs)], [tail, 1 - tail])
    wider = _quantile_ratio(count - 1, 1 - tail)
    ends = (middle + (float(end) - middle) * wider for end in (low, high))
    low, high = (math.exp(end) for end in ends)
    return Interval(ratio=math.exp(middle), low=min(low, math.exp(middle)), high=max(high, math.exp(middle)))


def _quantile_ratio(freedom: int, probability: float) -> float:
    """Quantile of Student's t over that of the normal (Cornish-Fisher, three terms)."""
    z: float = NormalDist().inv_cdf(probability)
    terms: tuple[float, ...] = (
        (z**2 + 1) / 4,
        (5 * z**4 + 16 * z**2 + 3) / 96,
        (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / 384,
    )
    wider: float = 1.0
    for power, term in enumerate(terms, 1):
        wider += term / freedom**power
    return wider


def phase_times(base: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Every phase of every mode, and how its time changed between two snapshots' `times`.

    mode, phase, measure ("elapsed": with what the rank computed before its calls; "in calls"), blocks (micro-batches
    compared). base_us, new_us (medians of a micro-batch), clock_ratio, clock_low (by the clock), beside (the phase that
    it is held against, "" without one). ratio, low, high, change ("slower", "faster", "~" for no significant
    difference, "too few"), mostly (the module with the largest growth, "" unless slower).
    """
    rows = [row for measure in _MEASURES for row in _measure_changes(base, new, measure)]
    columns = "mode phase measure blocks base_us new_us clock_ratio clock_low beside ratio low high change mostly"
    return pd.DataFrame(rows, columns=columns.split()).sort_values(["mode", "phase"], kind="stable", ignore_index=True)


def _measure_changes(base: pd.DataFrame, new: pd.DataFrame, measure: str) -> Iterator[tuple[object, ...]]:
    column = _MEASURES[measure]
    for mode in [mode for mode in base["mode"].unique() if mode in set(new["mode"])]:
        old, now = (times[times["mode"] == mode] for times in (base, new))
        left, right = _times_by_block(old, column), _times_by_block(now, column)
        shared = left.index.intersection(right.index), left.columns.intersection(right.columns)
        left, right = left.loc[shared], right.loc[shared]
        drift = (right.median() / left.median()).dropna()
        for phase in left.columns:
            spent = left.gt(0) & right.gt(0)
            meetings = spent[spent[phase]].sum()  # by phase, the micro-batches in which both spent time in it and here
            beside = _middle_phase(drift.drop(phase, errors="ignore"), meetings)
            both = left[phase].gt(0) & right[phase].gt(0)
            if beside:
                both &= left[beside].gt(0) & right[beside].gt(0)
            here, there = left[both], right[both]
            clock = ratio_of_medians(here[phase].to_numpy(), there[phase].to_numpy())
            one, two = ((times[phase] / times[beside] if beside else times[phase]) for times in (here, there))
            apart = ratio_of_medians(one.to_numpy(), two.to_numpy())
            change = "slower" if apart.low > 1 else "faster" if apart.high < 1 else "~"
            change = "too few" if math.isnan(apart.ratio) else change
            where = (
                _slowest_module(old, now, str(phase), column, clock.ratio / apart.ratio) if change == "slower" else ""
            )
            medians = here[phase].median(), there[phase].median()
            interval = apart.ratio, apart.low, apart.high, change, where
            yield mode, phase, measure, len(here), *medians, clock.ratio, clock.low, beside, *interval


def _times_by_block(times: pd.DataFrame, column: str) -> pd.DataFrame:
    """Microseconds, a row each micro-batch, a column each phase."""
    return times.pivot_table(index=_BLOCK, columns="phase", values=column, aggfunc="sum", observed=True)


def _middle_phase(drift: pd.Series, meetings: pd.Series) -> str:
    """The phase whose change is the median (of two in the middle the greater): never the only one that became faster.

    Only the phases with the most `meetings` are considered.
    """
    often = meetings.reindex(drift.index)
    ranked = drift[often == often.max()].sort_values(kind="stable")
    return str(ranked.index[len(ranked) // 2]) if len(ranked) else ""


def _slowest_module(base: pd.DataFrame, new: pd.DataFrame, phase: str, column: str, drift: float) -> str:
    """The module of this phase whose time grew most beyond the drift of the machine."""
    old, now = (times[times["phase"] == phase].groupby("region")[column].sum() for times in (base, new))
    growth = now.sub(old * drift, fill_value=0.0)
    return str(growth.idxmax()) if len(growth) else ""
