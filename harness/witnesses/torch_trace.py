"""The torch profiler as a witness: a rank's Chrome trace, its `c10d::` rows and the header's list of groups.

On gloo the `gloo:` rows misname reduce-scatter, so they give no op; a `c10d::` row gives op, dims, order and thread.
Groups, and the dtype of what came as a list, come from torch's own Flight Recorder, whose entries follow the rows in
order (`flight_record`, `_dump_fr_trace_json`). Without entries that reconcile, groups are the header's candidates and
the dtype is that of the backend's rows with the same dims. On NCCL `record_param_comms` rows give both (not tried).
Formats: torch/csrc/distributed/c10d/FlightRecorder.hpp, kineto output_json.cpp; torch 2.13.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.harness.engines.calls.operators import OPERATORS
from shardproof.harness.errors import MachineError
from shardproof.harness.witnesses.agreement import UNKNOWN, Sighting
from shardproof.harness.witnesses.trace_rows import CALL, Phases, nested

TRACE_SUFFIX, FLIGHT_SUFFIX = ".trace.json", ".flight.json"
_BYTES = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "bool": 1, "unsigned char": 1, "signed char": 1}
_BYTES |= {"short": 2, "int": 4, "long int": 8, "long": 8, "long long": 8, "half": 2, "bfloat16": 2}
_FLIGHT_BYTES = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Bool": 1, "Byte": 1, "Char": 1, "Short": 2}
_FLIGHT_BYTES |= {"Int": 4, "Long": 8}


_UNLOGGED = {"send", "recv_", "recv_any_source_", "monitored_barrier_"}
"""Operators that gloo's log leaves out."""
_SEVERAL = {"reduce_scatter_", "reduce_scatter_tensor_coalesced_"}
"""Operators that gloo lowers to one call for each of their input tensors."""
_NESTED = {"allgather_", "allgather_coalesced_"}
"""Operators whose outputs are a list of lists, of which a trace has no dims."""
Json = Mapping[str, Any]


def backend_word(op: str) -> str:
    """Name in gloo's own rows of the call that carries out an op of the ledger."""
    return "all_reduce" if op == "reduce_scatter" else op


def read_traces(folder: Path, world_size: int) -> list[Sighting]:
    """The sightings of every rank. Raises MachineError when a rank left no readable trace."""
    return [seen for rank in range(world_size) for seen in read_rank(folder / f"rank{rank}{TRACE_SUFFIX}", rank)]


def read_rank(path: Path, rank: int) -> list[Sighting]:
    """The sightings of one rank, with the Flight Recorder's entries beside its trace when there are any."""
    trace = _load(path)
    beside = path.with_name(path.name.removesuffix(TRACE_SUFFIX) + FLIGHT_SUFFIX)
    entries = _load(beside).get("entries", []) if beside.exists() else []
    return sightings(trace, entries, rank)


def sightings(trace: Json, entries: Sequence[Json], rank: int) -> list[Sighting]:
    """The ledger of one rank, rebuilt from a trace and the Flight Recorder's entries of the same stretch."""
    phases = Phases()
    rows: list[Json] = []
    for kind, row, calls_modules in nested(trace.get("traceEvents", [])):
        if kind != CALL or _name(row) in OPERATORS:
            phases.feed(kind, row, calls_modules)
        if kind == CALL and _name(row) in OPERATORS:
            rows.append(row)
    logged = _logged(rows, entries)
    header = trace.get("distributedInfo", {}).get("pg_config", [])
    backend = [row for row in trace.get("traceEvents", []) if str(row.get("name", "")).startswith("gloo:")]
    calls = zip(rows, logged, phases.phases(), strict=True)
    return [_sighting(rank, i, row, entry, phase, header, backend) for i, (row, entry, phase) in enumerate(calls)]


def _sighting(
    rank: int, index: int, row: Json, entry: Json | None, phase: str, header: Sequence[Json], backend: Sequence[Json]
) -> Sighting:
    return Sighting(
        rank=rank,
        index=index,
        op=OPERATORS[_name(row)].op,
        groups=_groups(entry, header, rank),
        payload_bytes=_payload(row, entry, backend),
        phase=phase,
        start_us=float(row["ts"]),
        duration_us=float(row.get("dur", 0.0)),
    )


def _load(path: Path) -> Json:
    try:
        loaded: Json = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise MachineError(f"witness torch: {path} cannot be read ({problem})") from problem
    return loaded


def _name(row: Json) -> str:
    return str(row["name"]).removeprefix("c10d::").partition(".")[0]


def _payload_at(row: Json) -> int:
    """The place of the payload among an operator's arguments, outputs before inputs; -1 without one."""
    payload = OPERATORS[_name(row)].payload
    return 1 if payload.startswith("input") else 0 if payload else -1


def _logged(rows: Sequence[Json], entries: Sequence[Json]) -> list[Json | None]:
    """The Flight Recorder's entry of every row, all None unless the entries are exactly those of the rows."""
    logs: list[Json | None] = []
    left = iter(entries)
    for row in rows:
        if _name(row) in _UNLOGGED:
            logs.append(None)
            continue
        several = len(list(_shapes(_dims(row, _payload_at(row))))) if _name(row) in _SEVERAL else 1
        mine = list(itertools.islice(left, several))
        word = backend_word(OPERATORS[_name(row)].op)
        if len(mine) < several or any(word not in str(entry.get("profiling_name")) for entry in mine):
            return [None] * len(rows)
        logs.append(mine[0])
    return logs if next(left, None) is None else [None] * len(rows)


def _groups(entry: Json | None, header: Sequence[Json], rank: int) -> tuple[tuple[int, ...], ...]:
    """The rank list that the header gives to the entry's group; without an entry, every group of this rank."""
    lists = {str(group["pg_name"]): tuple(sorted(group.get("ranks", ()))) for group in header}
    if entry is not None and (ranks := lists.get(str(entry["process_group"][0]))):
        return (ranks,)
    return tuple(dict.fromkeys(ranks for ranks in lists.values() if rank in ranks))


def _dims(row: Json, at: int) -> Any:
    dims = row.get("args", {}).get("Input Dims", [])
    return dims[at] if 0 <= at < len(dims) else []


def _shapes(dims: Any) -> Iterator[list[int]]:
    """The shapes in an argument's dims: of a tensor, a list of them, or a list of lists."""
    if all(isinstance(size, int) for size in dims):
        yield list(dims)
    else:
        for part in dims:
            yield from _shapes(part)


def _payload(row: Json, entry: Json | None, backend: Sequence[Json]) -> int:
    at = _payload_at(row)
    if at < 0:
        return 0
    dims = _dims(row, at)
    if not dims and _name(row) in _NESTED:
        dims = entry.get("output_sizes", []) if entry is not None else []
        if not dims:
            return UNKNOWN
    elements = sum(math.prod(shape) for shape in _shapes(dims))
    size = _item_bytes(row, at, entry, backend)
    return UNKNOWN if size is None else elements * size


def _item_bytes(row: Json, at: int, entry: Json | None, backend: Sequence[Json]) -> int | None:
    types = row.get("args", {}).get("Input type", [])
    if 0 <= at < len(types) and types[at] in _BYTES:
        return _BYTES[types[at]]
    if entry is not None:
        sizes = {_FLIGHT_BYTES.get(name) for name in (*entry.get("input_dtypes", ()), *entry.get("output_dtypes", ()))}
        return sizes.pop() if len(sizes) == 1 else None
    shape = next(_shapes(_dims(row, at)), [])
    after = [r for r in backend if r["args"].get("Input Dims", [None])[:1] == [shape] and r["ts"] >= row["ts"]]
    nearest = min(after, key=lambda r: float(r["ts"]), default=None)
    return None if nearest is None else _BYTES.get(nearest["args"].get("Input type", [""])[0])
