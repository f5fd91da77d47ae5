"""What would make a case fit into the device's memory: legal changes of its words, each forecast, the smallest kept.

Three kinds of change are tried: recompute=full; more ranks to a layer (tp, with fewer data ranks); weights split too
(mode=isp, wp). Of each kind the strongest legal change comes first: where that needs too much, no weaker one fits, and
where it fits, the weakest that still does is sought. Sizes are bytes of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from harness.predicting.figures import Forecast
from harness.protocols import Subject
from reports.predicting.planning import Candidate, candidate

_LESS = "recompute=full"
_SPLIT = "mode=isp"
_WIDEST = 8
"""A search widens tp up to so many times."""
Measure = Callable[[Candidate], Forecast]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    change: str
    forecast: Forecast


def changes(one: Candidate, own: Forecast, subject: Subject, measure: Measure) -> pd.DataFrame:
    """change, peak_bytes, tokens_per_s_per_rank (NaN where nothing was measured), fits ("yes", "no"): what was tried.

    Where the optimizer's states are by formula, a distributed optimizer over the data ranks is counted too, unless the
    case has one (`zero=`).
    """
    search = _Search(one=one, own=own, subject=subject, measure=measure)
    rows: list[tuple[str, float, float]] = []
    kept = own.memory.parameters + own.memory.gradients
    least = kept + own.memory.optimizer / (_data_ranks(own) if one.states else 1)
    if least > own.room_bytes:
        rows.append(("any recompute: parameters, gradients and optimizer stay", kept + own.memory.optimizer, math.nan))
    else:
        rows += _with_split_states(one, search.of_kind([_LESS]))
    for ladder in (_wider(own), _shards(own)):
        rows += _with_split_states(one, search.of_kind(ladder))
    cells = [(change, peak, speed, "yes" if peak <= own.room_bytes else "no") for change, peak, speed in rows]
    return pd.DataFrame(cells, columns=["change", "peak_bytes", "tokens_per_s_per_rank", "fits"])


def _with_split_states(one: Candidate, found: Iterable[_Tried]) -> Iterator[tuple[str, float, float]]:
    """Change, bytes and speed of what was tried; what does not fit also with its optimizer split over data ranks."""
    for tried in found:
        memory, speed, apart = tried.forecast.memory, tried.forecast.tokens_per_s_per_rank, _data_ranks(tried.forecast)
        yield tried.change, memory.peak, speed
        if one.states and not tried.forecast.fits and apart > 1:
            name = f"{tried.change}, and a distributed optimizer over {apart:,} ranks"
            yield name, memory.peak - memory.optimizer * (1 - 1 / apart), speed


def _size(own: Forecast, axis: str) -> int:
    return len(own.case.axes.get(axis, ((0,),))[0])


def _data_ranks(own: Forecast) -> int:
    """Ranks that hold the same states of the optimizer; 1 where the case has them share these already."""
    return 1 if getattr(own.case, "zero", 0) else _size(own, "wdp" if "wdp" in own.case.axes else "dp")


def _wider(own: Forecast) -> list[str]:
    if own.case.mode == _SPLIT.removeprefix("mode="):  # its tp splits no weights
        return []
    tp, dp = _size(own, "tp"), _size(own, "dp")
    factors = [2**power for power in range(1, _WIDEST.bit_length())]
    return [f"tp={tp * factor} dp={dp // factor}" for factor in factors if dp % factor == 0]


def _shards(own: Forecast) -> list[str]:
    world, least = own.case.world_size, _size(own, "wp")
    sizes = [2**power for power in range(1, world.bit_length())]
    return [f"{_SPLIT} wp={size}" for size in sizes if world % size == 0 and size > least]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """One case that does not fit, and how another is measured."""

    one: Candidate
    own: Forecast
    subject: Subject
    measure: Measure

    def of_kind(self, ladder: Sequence[str]) -> Iterator[_Tried]:
        """What fits of this ladder, weakest first; or the least that it comes to."""
        legal = [change for change in ladder if self._candidate(change).case is not None]
        if not legal:
            return
        recompute = "" if legal[-1] == _LESS else f" {_LESS}"
        # What backward needs alone is too much: a split of weights changes nothing in that.
        more = recompute if self.own.memory.saved > self.own.room_bytes else ""
        least = self._tried(legal[-1] + more)
        if not least.forecast.fits and more != recompute:
            more = recompute
            least = self._tried(legal[-1] + more)
        if least.forecast.fits:
            for size, change in enumerate(legal[:-1]):
                if self._may_fit(least.forecast, 2 ** (len(legal) - 1 - size)):
                    weaker = self._tried(change + more)
                    if weaker.forecast.fits:
                        yield weaker
                        break
        yield least

    def _may_fit(self, least: Forecast, times: int) -> bool:
        """Whether this many times the states of the least would still fit: the rest can only be more."""
        memory = least.memory
        states = memory.parameters + memory.gradients + memory.optimizer
        return memory.peak + (times - 1) * states <= least.room_bytes

    def _candidate(self, change: str) -> Candidate:
        return candidate(f"{self.one.text} {change}", change, self.subject)

    def _tried(self, change: str) -> _Tried:
        return _Tried(change=change, forecast=self.measure(self._candidate(change)))
