"""The torch profiler as a witness: a rank's trace, and torch's own log of the same calls beside it.

Groups, and dtypes of lists, come from torch's Flight Recorder (harness.traces.logged). Without entries that reconcile,
the groups of a call are those of the header that have the rank. NCCL's traces have both (not tried).
"""

from pathlib import Path

from shardproof.harness.errors import MachineError, RequestError
from shardproof.harness.traces.calls import Trace
from shardproof.harness.traces.flight_recorder import read_flight_recorder
from shardproof.harness.traces.kineto import read_kineto
from shardproof.harness.traces.logged import with_log
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
