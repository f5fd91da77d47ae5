"""Groups and kernels of a trace of the torch profiler, as its rows name them.

A list of ranks in a row is a text that is cut after 30 entries; in the header it is whole, except in an on-demand
trace. A list that is shorter than its group is ignored.

A kernel belongs to the call whose row launched it (`External id`). A communicating kernel without such a call, before
the first kernel with one, belongs to a call that was issued before the trace began, since the device runs behind the
host. Later ones, and those that a CUDA graph of the trace launched, belong to calls that left no row. Times are in
microseconds.
"""

import math
import re
from array import array
from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardproof.harness.traces.calls import MOST_RANKS, Stretches, TracedStep, covered_us, minus, union


class TracedGroup(NamedTuple):
    """A group as far as it is known: `ranks` is () and `size` None if they are not."""

    ranks: tuple[int, ...] = ()
    name: str = ""
    description: str = ""
    size: int | None = None


class Groups:
    """The groups of a header, by torch's names. `ranks` has those whose lists are complete."""

    def __init__(self, config: Sequence[Mapping[str, Any]]) -> None:
        self.ranks: dict[str, tuple[int, ...]] = {}
        self._known: dict[str, TracedGroup] = {}
        for one in config:
            name = str(one.get("pg_name", ""))
            ranks = _numbers(one.get("ranks"))
            size = one.get("pg_size")
            size = size if isinstance(size, int) else len(ranks) or None
            ranks = ranks if len(ranks) == size else ()
            self._known[name] = TracedGroup(ranks, name, str(one.get("pg_desc", "")), size)
            if ranks:
                self.ranks[name] = ranks

    def of(self, args: Mapping[str, Any]) -> TracedGroup:
        """The group of a row with these fields."""
        name = str(args.get("Process Group Name", args.get("Process Group ID", "")))
        known = self._known.get(name, TracedGroup())
        size = args.get("Group size")
        size = size if isinstance(size, int) and size > 0 else known.size
        description = str(args.get("Process Group Description") or known.description)
        ranks = known.ranks if len(known.ranks) == size else _numbers(args.get("Process Group Ranks"))
        if len(ranks) != size:
            ranks = _ranks_by_stride(args, size)
        return TracedGroup(ranks, name, "" if description == "undefined" else description, size)


def _numbers(value: object) -> tuple[int, ...]:
    """A list of numbers, or a text with one; () if the text is cut."""
    if isinstance(value, str):
        return () if "..." in value else tuple(map(int, re.findall(r"\d+", value)))
    if not isinstance(value, list | tuple) or any(type(one) is not int for one in value):
        return ()
    return tuple(value)


def _ranks_by_stride(args: Mapping[str, Any], size: int | None) -> tuple[int, ...]:
    """The ranks of a group with a constant stride, if torch states that."""
    first, stride = args.get("Global rank start"), args.get("Global rank stride")
    if (
        not isinstance(first, int)
        or not isinstance(stride, int)
        or size is None
        or first < 0
        or stride < 1
        or size > MOST_RANKS
    ):
        return ()
    return tuple(range(first, first + stride * size, stride))


_KERNELS = ("nccl", "rccl", "msccl")
"""Words in the names of kernels that communicate. So do other kernels that are launched inside of a call."""
NO_ID = -1


class KernelRows:
    """The kernels of a trace, in columns: a large trace has millions."""

    def __init__(self) -> None:
        self._starts, self._ends = array("d"), array("d")
        self._launched_by, self._correlation = array("q"), array("q")
        self._named = bytearray()
        self.graphs: set[int] = set()
        """Correlations of the rows that launch a graph."""

    def append(self, name: str, start_us: float, end_us: float, args: Mapping[str, object]) -> None:
        """Take the next kernel. Raises ValueError or TypeError for ids that are no numbers."""
        self._starts.append(start_us)
        self._ends.append(end_us)
        self._launched_by.append(id_of(args, "External id"))
        self._correlation.append(id_of(args, "correlation"))
        self._named.append("Collective name" in args or any(word in name for word in _KERNELS))

    def __len__(self) -> int:
        return len(self._starts)

    def bind(self, ids: Container[int]) -> "Kernels":
        """The kernels; those launched by rows with these ids belong to calls."""
        communicates = bytearray(named or one in ids for named, one in zip(self._named, self._launched_by, strict=True))
        by_id, of_no_call = dict[int, tuple[float, float]](), list[int]()
        for place, launched_by in enumerate(self._launched_by):
            if launched_by in ids:
                start, end = self._starts[place], self._ends[place]
                before = by_id.get(launched_by, (start, end))
                by_id[launched_by] = min(start, before[0]), max(end, before[1])
            elif self._named[place]:
                of_no_call.append(place)
        first_us = min((start for start, _ in by_id.values()), default=-math.inf)
        early = sum(
            self._starts[place] < first_us and self._correlation[place] not in self.graphs for place in of_no_call
        )
        return Kernels(
            computation=union(self._stretches(communicates, 0)),
            communication=union(self._stretches(communicates, 1)),
            by_id=by_id,
            early=early,
            unbound=len(of_no_call) - early if by_id or self.graphs else 0,
        )

    def _stretches(self, communicates: bytearray, wanted: int) -> Iterator[tuple[float, float]]:
        rows = zip(self._starts, self._ends, communicates, strict=True)
        return ((start, end) for start, end, kind in rows if kind == wanted)


def id_of(args: Mapping[str, object], name: str) -> int:
    """An id in the fields of a row, NO_ID if it has none. Raises ValueError or TypeError for an invalid one."""
    found = args.get(name, NO_ID)
    if not isinstance(found, int | float | str):
        raise TypeError(f"{name} is a {type(found).__name__}, and must be a number")
    return int(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """When kernels computed and communicated. `by_id`: first start and last end of those that a row of a call launched.

    `early` counts kernels of calls that were issued before the trace began, `unbound` those of calls without a row.
    """

    computation: Stretches
    communication: Stretches
    by_id: Mapping[int, tuple[float, float]]
    early: int
    unbound: int

    def times_of(self, ids: tuple[int, ...]) -> tuple[float | None, float | None]:
        """When the first kernel of a call began, and how long it took up to the end of the last one."""
        times = [self.by_id[one] for one in ids if one in self.by_id]
        start_us = min((start for start, _ in times), default=None)
        return start_us, None if start_us is None else max(end for _, end in times) - start_us


class StepTimes:
    """The profiler's steps, to be looked up by time."""

    def __init__(self, steps: Mapping[int, tuple[float, float]]) -> None:
        self._ordered = sorted((start, end, number) for number, (start, end) in steps.items())

    def at(self, time_us: float) -> int | None:
        """The step at this time."""
        place = bisect_right(self._ordered, (time_us, math.inf, 0)) - 1
        return self._ordered[place][2] if place >= 0 and time_us < self._ordered[place][1] else None


def extend_step(steps: dict[int, tuple[float, float]], number: int, start_us: float, end_us: float) -> None:
    """Add a row of a step, which has one for each stream of a device."""
    start, end = steps.get(number, (start_us, end_us))
    steps[number] = min(start, start_us), max(end, end_us)


def build_steps(
    steps: Mapping[int, tuple[float, float]], on_device: Mapping[int, tuple[float, float]], kernels: Kernels
) -> tuple[TracedStep, ...]:
    """The steps. On the device a step ends when the next one begins there, the last one with the last kernel."""
    exposed = minus(kernels.communication, kernels.computation)
    ordered = sorted(steps.items())
    starts = [on_device.get(number, times)[0] for number, times in ordered]
    last_us = max((end for _, end in (*kernels.computation[-1:], *kernels.communication[-1:])), default=-math.inf)
    built = []
    for (number, (start, end)), first, after in zip(ordered, starts, [*starts, last_us][1:], strict=True):
        step = TracedStep(number=number, start_us=start, end_us=end)
        if last_us > -math.inf and after > first:
            step = replace(
                step,
                device_us=after - first,
                compute_us=covered_us(kernels.computation, first, after),
                communication_us=covered_us(kernels.communication, first, after),
                exposed_us=covered_us(exposed, first, after),
            )
        built.append(step)
    return tuple(built)
