"""The torch profiler as a witness: the calls of a rank by its trace, how long each took, and which rank came late.

Groups, and dtypes of lists, come from torch's Flight Recorder (harness.traces.reading). Without entries that reconcile,
the groups of a call are those of the header that have the rank. NCCL's traces have both (not tried).

A collective lasts as long as its kernels, on gloo as the backend's rows, which run beside the program. The time in
which other kernels run meanwhile, on gloo the rank's own `aten::` rows, is overlapped with compute; the rest is exposed
(harness.traces.kineto). A rank is late by how much after the first rank of the group it issued the same call.
Microseconds; ranks of one machine share a clock. The profiler itself slows compute: compare durations with each other,
and seconds with the unwatched runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardproof.harness.errors import MachineError, RequestError
from shardproof.harness.traces.calls import Trace, TracedCall, covered_us
from shardproof.harness.traces.flight_recorder import read_flight_recorder
from shardproof.harness.traces.kineto import read_kineto
from shardproof.harness.traces.reading import with_log
from shardproof.harness.witnesses.agreement import Sighting, sighting_of

TRACE_SUFFIX, FLIGHT_SUFFIX = ".trace.json", ".flight.json"


def read_traces(folder: Path, world_size: int) -> list[Sighting]:
    """The sightings of every rank. Raises MachineError when a rank left no readable trace."""
    return [seen for rank in range(world_size) for seen in read_rank(folder / f"rank{rank}{TRACE_SUFFIX}", rank)]


def read_rank(path: Path, rank: int) -> list[Sighting]:
    """The sightings of one rank, with the Flight Recorder's entries beside its trace when there are any.

    Raises MachineError for a trace that cannot be read.
    """
    beside = path.with_name(path.name.removesuffix(TRACE_SUFFIX) + FLIGHT_SUFFIX)
    try:
        trace = read_kineto(path)
        return sightings(with_log(trace, read_flight_recorder(beside)) if beside.exists() else trace, rank)
    except RequestError as problem:
        raise MachineError(f"witness torch: {path} cannot be read ({problem})") from problem


def sightings(trace: Trace, rank: int) -> list[Sighting]:
    """The ledger of one rank, rebuilt from a trace."""
    own = tuple(dict.fromkeys(tuple(sorted(ranks)) for ranks in trace.groups.values() if rank in ranks))
    calls = enumerate(trace.calls)
    return [sighting_of(call, rank, index, **({} if call.group else {"groups": own})) for index, call in calls]


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


def time_sightings(folder: Path, seen: Sequence[Sighting]) -> list[Timed]:
    """The times of the sightings of a session's traces, in the same order, without sightings of unknown times."""
    times: dict[tuple[int, int], TracedCall] = {}
    starts: dict[tuple[int, int], float] = {}
    computed = {}
    for rank in {one.rank for one in seen}:
        trace = read_kineto(folder / f"rank{rank}{TRACE_SUFFIX}", operators=True)
        computed[rank] = trace.computed
        times |= {(rank, index): call for index, call in enumerate(trace.calls)}
        starts |= {(one.rank, one.index): trace.origin_us + one.start_us for one in seen if one.rank == rank}
    late = _late(seen, starts)
    found = []
    for one in seen:
        call = times[one.rank, one.index]
        if call.device_start_us is not None and call.device_us is not None:
            end_us = call.device_start_us + call.device_us
            overlapped = covered_us(computed[one.rank], call.device_start_us, end_us)
            place = one.rank, one.index
            found.append(Timed(seen=one, duration_us=call.device_us, overlapped_us=overlapped, late_us=late[place]))
    return found


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
