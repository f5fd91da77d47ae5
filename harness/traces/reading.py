"""Traces of any format, recognised by their content: one function for a file, one for the files of a job.

The torch profiler on gloo knows neither groups nor dtypes; a dump of torch's Flight Recorder of the same time adds
them.
"""

import itertools
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from shardproof.harness.errors import RequestError
from shardproof.harness.traces.calls import FLIGHT_RECORDER, TORCH, Trace, TracedCall, find_dtype, payload_bytes
from shardproof.harness.traces.event_stream import open_trace
from shardproof.harness.traces.files import LEGAL, RANK, REPORTS, rank_pattern, refuse_torn, trace_files
from shardproof.harness.traces.flight_recorder import read_flight_recorder
from shardproof.harness.traces.kineto import backend_word, operator_of, read_kineto
from shardproof.harness.traces.nsys import read_nsys
from shardproof.harness.traces.nsys_export import export_report, nsys_path

_UNLOGGED = {"send", "recv_", "recv_any_source_", "monitored_barrier_"}
"""Operators that gloo's log leaves out."""
_SEVERAL = {"reduce_scatter_", "reduce_scatter_tensor_coalesced_"}
"""Operators that gloo carries out as one call for each of their input tensors."""


def with_log(trace: Trace, log: Trace) -> Trace:
    """The trace with the groups and dtypes of the calls in a Flight Recorder's dump."""
    logged = zip(trace.calls, _match_entries(trace.calls, log.calls), strict=True)
    return replace(
        trace, calls=tuple(call if one is None else _complete_call(call, one, trace) for call, one in logged)
    )


def _match_entries(calls: Sequence[TracedCall], entries: Sequence[TracedCall]) -> list[TracedCall | None]:
    """The entry of every call, all None unless the entries are exactly those of the calls."""
    logs: list[TracedCall | None] = []
    left = iter(entries)
    for call in calls:
        if operator_of(call.name) in _UNLOGGED:
            logs.append(None)
            continue
        several = len(call.shapes or ()) if operator_of(call.name) in _SEVERAL else 1
        mine = list(itertools.islice(left, several))
        word = backend_word(call.op)
        if len(mine) < several or any(word not in entry.name for entry in mine):
            return [None] * len(calls)
        logs.append(mine[0])
    return logs if next(left, None) is None else [None] * len(calls)


def _complete_call(call: TracedCall, entry: TracedCall, trace: Trace) -> TracedCall:
    ranks = trace.groups.get(entry.group_name, ())
    call = replace(call, group_name=entry.group_name, group_desc=entry.group_desc)
    if ranks:
        call = replace(call, group=ranks, group_size=len(ranks))
    dtype, shapes = find_dtype(entry.dtype), call.shapes or entry.shapes
    if call.payload_bytes is not None or dtype is None or not shapes:
        return call
    return replace(call, dtype=dtype.name, shapes=shapes, payload_bytes=payload_bytes(dtype, shapes))


_HEAD_BYTES = 2**20


def read_trace(path: Path) -> list[Trace]:
    """The traces of the ranks in a file: one, except in a report of nsys. Raises RequestError, in one sentence."""
    if path.suffix in REPORTS:
        return _read_report(path)
    with refuse_torn("trace", path, LEGAL), open_trace(path) as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"SQLite format 3\0"):
        with refuse_torn("trace", path, LEGAL):
            return read_nsys(path)
    if head[:1] == b"\x80" or (b'"traceEvents"' not in head and b'"entries"' in head):
        return [read_flight_recorder(path)]
    if head.lstrip()[:1] not in (b"{", b"["):
        raise RequestError(f"trace {path}: is of no known format; legal: {LEGAL}")
    return [read_kineto(path)]


def _read_report(path: Path) -> list[Trace]:
    """The traces in a report that nsys must export first. Raises RequestError without nsys."""
    nsys = nsys_path()
    if nsys is None:
        rule = "is a report, which the nsys that made it must export, and nsys is not on PATH"
        raise RequestError(f"trace {path}: {rule}; legal: nsys export --type sqlite {path.name}")
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / path.name
        copied.symlink_to(path.resolve())
        return [replace(trace, source=str(path)) for trace in read_nsys(export_report(nsys, copied.with_suffix("")))]


def read_traces(names: Iterable[str], rank_regex: str = RANK) -> list[Trace]:
    """The traces in these files and folders, by rank.

    A trace of the torch profiler and a dump of the Flight Recorder of one rank are one trace: the dump completes it. If
    a file does not state its rank, the pattern's group 1 matches it in the name. Raises RequestError for what is no
    trace, a file without a rank, and two files of one rank.
    """
    pattern = rank_pattern(rank_regex)
    found: dict[int, Trace] = {}
    for name in names:
        for path in trace_files(Path(name)):
            for trace in read_trace(path):
                rank = _rank(trace, path, pattern)
                if rank in found and {trace.format, found[rank].format} == {TORCH, FLIGHT_RECORDER}:
                    found[rank] = _join_traces(found[rank], trace)
                    continue
                if rank in found:
                    rule = f"rank {rank} is in {found[rank].source} too"
                    raise RequestError(f"trace {path}: {rule}; legal: one file a rank, all of one window")
                found[rank] = replace(trace, rank=rank)
    return [found[rank] for rank in sorted(found)]


def _join_traces(one: Trace, other: Trace) -> Trace:
    """Two traces of one rank, by the torch profiler and the Flight Recorder, as one."""
    profiled, logged = (one, other) if one.format == TORCH else (other, one)
    return replace(with_log(profiled, logged), rank=one.rank)


def _rank(trace: Trace, path: Path, pattern: re.Pattern[str]) -> int:
    """The rank that the file states, else that of its name."""
    if trace.rank is not None:
        return trace.rank
    found = pattern.search(path.name)
    if not found or not (found[1] or "").isdecimal():
        rule = f"does not state its rank, and {pattern.pattern!r} finds none in its name"
        raise RequestError(f"trace {path}: {rule}; legal: --rank-regex 'worker(\\d+)'")
    return int(found[1])
