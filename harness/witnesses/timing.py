"""How long collectives took, how much of it was exposed, and which rank came late: from the profiler's traces.

A collective lasts as long as its backend's rows (`gloo:`), which run beside the program. On a GPU it lasts as long as
the kernels of NCCL that its own row launched (not tried: read from kineto's output_json.cpp). The part of that on the
rank's own `aten::` rows, or its other kernels, is overlapped with compute, the rest is exposed. A rank is late by how
much after the first rank of the group it issued the same call. Microseconds; ranks of one machine share a clock. The
profiler itself slows compute: compare durations with each other, and seconds with the unwatched runs.
"""

import json
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

from shardproof.harness.traces.logged import backend_word
from shardproof.harness.witnesses.agreement import Sighting
from shardproof.harness.witnesses.torch_trace import TRACE_SUFFIX

Span = tuple[float, float]
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHING = {"cuda_runtime", "cuda_driver"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median of some values, and the interval that holds the true median in 95 of 100 such samples (all of few)."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A collective with its times."""

    seen: Sighting
    duration_us: float
    overlapped_us: float
    late_us: float

    @property
    def exposed_us(self) -> float:
        """Time that the rank's compute did not hide."""
        return self.duration_us - self.overlapped_us


def spread(values: Sequence[float]) -> Spread:
    """Median and order-statistics interval: distribution-free, from the binomial of n fair coins."""
    ordered, n = sorted(values), len(values)
    tail, cut = 0.0, 0
    while cut < n // 2 and tail + comb(n, cut) / 2**n <= 0.025:
        tail += comb(n, cut) / 2**n
        cut += 1
    first = max(cut - 1, 0)
    return Spread(median=statistics.median(ordered), low=ordered[first], high=ordered[n - 1 - first])


def time_sightings(folder: Path, seen: Sequence[Sighting]) -> list[Timed]:
    """The times of every sighting of a session's traces, in the same order."""
    starts: dict[tuple[int, int], float] = {}
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    for rank in sorted({s.rank for s in seen}):
        trace = json.loads((folder / f"rank{rank}{TRACE_SUFFIX}").read_text(encoding="utf-8"))
        mine = [s for s in seen if s.rank == rank]
        base_us = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
        starts |= {(rank, s.index): base_us + s.start_us for s in mine}
        spans |= {(rank, index): both for index, both in _spans(trace, mine).items()}
    late = _late(seen, starts)
    return [
        Timed(
            seen=s,
            duration_us=spans[s.rank, s.index][0],
            overlapped_us=spans[s.rank, s.index][1],
            late_us=late[s.rank, s.index],
        )
        for s in seen
    ]


def _spans(trace: Mapping[str, Any], seen: Sequence[Sighting]) -> dict[int, tuple[float, float]]:
    """Index -> duration and what of it is overlapped with compute, of one rank."""
    rows = [row for row in trace.get("traceEvents", ()) if "dur" in row]
    if any(row.get("cat") in _ON_DEVICE for row in rows):
        return _on_device(rows, seen)
    compute = join_spans(_span(row) for row in rows if str(row["name"]).startswith("aten::"))
    waiting: dict[str, list[Span]] = {}
    for row in sorted(rows, key=lambda row: float(row["ts"])):
        if str(row["name"]).startswith("gloo:"):
            waiting.setdefault(str(row["name"]).removeprefix("gloo:"), []).append(_span(row))
    found = {}
    for s in seen:
        ready = waiting.get(backend_word(s.op), [])
        at = next((i for i, (start, _) in enumerate(ready) if start >= s.start_us), None)
        span = (s.start_us, s.start_us + s.duration_us) if at is None else ready.pop(at)
        found[s.index] = (span[1] - span[0], shared_time(span, compute))
    return found


def _on_device(rows: Sequence[Mapping[str, Any]], seen: Sequence[Sighting]) -> dict[int, tuple[float, float]]:
    """Times from the kernels: a row of the host that launches one carries its correlation."""
    work = [row for row in rows if row.get("cat") in _ON_DEVICE]
    compute = join_spans(_span(row) for row in work if not _is_nccl(row))
    launched = {_correlation(row): float(row["ts"]) for row in rows if row.get("cat") in _LAUNCHING}
    nccl = [row for row in work if _is_nccl(row) and _correlation(row) in launched]
    calls = sorted((launched[_correlation(row)], _span(row)) for row in nccl)
    starts = [at for at, _ in calls]
    found = {}
    for s in seen:
        first, last = bisect_left(starts, s.start_us), bisect_right(starts, s.start_us + s.duration_us)
        mine = [span for _, span in calls[first:last]]
        begun = min((start for start, _ in mine), default=s.start_us)
        span = (begun, max((end for _, end in mine), default=begun))
        found[s.index] = (span[1] - span[0], shared_time(span, compute))
    return found


def _is_nccl(row: Mapping[str, Any]) -> bool:
    return str(row["name"]).startswith("nccl")


def _correlation(row: Mapping[str, Any]) -> object:
    return row.get("args", {}).get("correlation")


def _span(row: Mapping[str, Any]) -> Span:
    return float(row["ts"]), float(row["ts"]) + float(row["dur"])


def join_spans(spans: Iterable[Span]) -> list[Span]:
    """The spans as disjoint ones, by start."""
    disjoint: list[Span] = []
    for start, end in sorted(spans):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(disjoint[-1][1], end))
        else:
            disjoint.append((start, end))
    return disjoint


def shared_time(span: Span, disjoint: Sequence[Span]) -> float:
    """How much of a span falls on disjoint ones, given by start."""
    first = max(bisect_left(disjoint, (span[0], 0.0)) - 1, 0)
    total = 0.0
    for start, end in disjoint[first:]:
        if start >= span[1]:
            break
        total += max(0.0, min(end, span[1]) - max(start, span[0]))
    return total


def _late(seen: Sequence[Sighting], starts: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """How long after the first rank each rank issued the same call, among sightings with the same `groups`."""
    together: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    counts: dict[tuple[object, ...], int] = {}
    for s in seen:
        key = (s.rank, s.groups)
        number = counts[key] = counts.get(key, -1) + 1
        together.setdefault((s.groups, number, s.op), []).append((s.rank, s.index))
    late: dict[tuple[int, int], float] = {}
    for members in together.values():
        first = min(starts[member] for member in members)
        late |= {member: starts[member] - first for member in members}
    return late
