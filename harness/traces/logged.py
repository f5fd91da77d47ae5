"""A trace of the torch profiler on gloo, completed by torch's Flight Recorder of the same stretch.

gloo's traces have neither groups nor the dtype of what came as a list. The recorder's entries follow the rows in order
(`_dump_fr_trace_json`), each group by its name in the header. Entries that are not exactly those of the calls complete
nothing.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from shardproof.harness.traces.calls import Trace, TracedCall, find_dtype, payload_bytes
from shardproof.harness.traces.kineto import backend_word, operator_of

_UNLOGGED = {"send", "recv_", "recv_any_source_", "monitored_barrier_"}
"""Operators that gloo's log leaves out."""
_SEVERAL = {"reduce_scatter_", "reduce_scatter_tensor_coalesced_"}
"""Operators that gloo lowers to one call for each of their input tensors."""


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
