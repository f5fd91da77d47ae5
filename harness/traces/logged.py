"""A trace of the torch profiler on gloo, completed by torch's Flight Recorder of the same stretch.

gloo's traces have neither groups nor the dtype of what came as a list. The recorder's entries follow the rows in order
(`_dump_fr_trace_json`), each group by its name in the header. Entries that are not exactly those of the calls complete
nothing.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardproof.harness.traces.calls import Dtype, Trace, TracedCall, find_dtype
from shardproof.harness.traces.kineto import operator_of

_UNLOGGED = {"send", "recv_", "recv_any_source_", "monitored_barrier_"}
"""Operators that gloo's log leaves out."""
_SEVERAL = {"reduce_scatter_", "reduce_scatter_tensor_coalesced_"}
"""Operators that gloo lowers to one call for each of their input tensors."""
Entry = Mapping[str, Any]


def with_log(trace: Trace, entries: Sequence[Entry]) -> Trace:
    """The trace with the groups and dtypes of the entries."""
    logged = zip(trace.calls, _logged(trace.calls, entries), strict=True)
    return replace(trace, calls=tuple(call if one is None else _completed(call, one, trace) for call, one in logged))


def backend_word(op: str) -> str:
    """Name in gloo's own rows of the call that carries out an op of the ledger."""
    return "all_reduce" if op == "reduce_scatter" else op


def _logged(calls: Sequence[TracedCall], entries: Sequence[Entry]) -> list[Entry | None]:
    """The entry of every call, all None unless the entries are exactly those of the calls."""
    logs: list[Entry | None] = []
    left = iter(entries)
    for call in calls:
        if operator_of(call.name) in _UNLOGGED:
            logs.append(None)
            continue
        several = len(call.shapes or ()) if operator_of(call.name) in _SEVERAL else 1
        mine = list(itertools.islice(left, several))
        word = backend_word(call.op)
        if len(mine) < several or any(word not in str(entry.get("profiling_name")) for entry in mine):
            return [None] * len(calls)
        logs.append(mine[0])
    return logs if next(left, None) is None else [None] * len(calls)


def _completed(call: TracedCall, entry: Entry, trace: Trace) -> TracedCall:
    name, description = map(str, (*entry["process_group"], "")[:2])
    ranks = trace.groups.get(name, ())
    call = replace(call, group_name=name, group_desc="" if description == "undefined" else description)
    if ranks:
        call = replace(call, group=ranks, group_size=len(ranks))
    dtype = _dtype(entry)
    shapes = call.shapes or tuple(map(tuple, entry.get("output_sizes") or ())) or None
    if call.payload_bytes is not None or dtype is None or shapes is None:
        return call
    size = dtype.item_bytes * sum(map(math.prod, shapes))
    return replace(call, dtype=dtype.name, shapes=shapes, payload_bytes=size)


def _dtype(entry: Entry) -> Dtype | None:
    """The dtype of an entry, None where it has several."""
    found = {find_dtype(str(name)) for name in (*entry.get("input_dtypes", ()), *entry.get("output_dtypes", ()))}
    return found.pop() if len(found) == 1 else None
