"""Reads a trace of the torch profiler (Kineto): one file a rank, of torch 1.13 to 2.15.

A call is up to three nested rows: `c10d::` (the operator), `record_param_comms`, `nccl:` (the backend). Since torch 2.2
the middle row has the fields of the call. In older traces it has none, and is written for waits too, so the `nccl:` row
stands for the call; its argument, if shapes were recorded, is what was sent. With gloo the `c10d::` row is the call,
and its own `gloo:` rows give times. Kernels give times, and belong to calls by `External id`. They are not counted: a
trace begins with kernels of an earlier step, and a coalesced kernel carries out several calls.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

from shardproof.harness.engines.calls.operators import OPERATORS
from shardproof.harness.errors import RequestError, ranks_text
from shardproof.harness.traces.calls import TORCH, Trace, TracedCall, find_dtype, find_op, payload_bytes, union
from shardproof.harness.traces.event_stream import LEGAL, Json, TraceEvents
from shardproof.harness.traces.files import refuse_torn
from shardproof.harness.traces.kineto_rows import NO_ID, Groups, KernelRows, StepTimes, build_steps, extend_step, id_of
from shardproof.harness.traces.phases import (
    CALL,
    FORWARD,
    MODULE,
    PROFILED,
    PlaceOfCall,
    TimedRow,
    TimedRows,
    kind_of,
    places,
)

PARAMETERS = "record_param_comms"
_NO_CALLS = frozenset({"wait", "init", "shutdown", "abort"})
"""`Collective name`s of rows that send nothing."""
_CPU = (b"cpu_op", b"user_annotation")
_LAUNCHING = (b"cuda_runtime", b"cuda_driver")
_GRAPH_LAUNCH = b"GraphLaunch"
"""In the names of rows that replay a graph: cudaGraphLaunch, cuGraphLaunch, hipGraphLaunch."""
_OF_OUTPUT = ("all_gather", "scatter", "recv")
"""Ops whose payload is their output; that of all others is their input."""
_OPERATOR, _FIELDS, _BACKEND = range(3)
"""Roles of the rows of a call: the operator of torch, the row with fields, the backend's row."""


class KinetoCall(NamedTuple):
    """A row of a call. `role` is _OPERATOR, _FIELDS or _BACKEND."""

    start_us: float
    end_us: float
    thread: object
    name: str
    role: int
    args: Mapping[str, Any]


_USED = frozenset(
    {"Collective name", "dtype", "In msg nelems", "Out msg nelems", "In split size", "Src Rank", "Dst Rank", "Seq"}
    | {"Process Group Name", "Process Group ID", "Process Group Description", "Process Group Ranks", "Group size"}
    | {"Global rank start", "Global rank stride", "External id"}
)
"""Fields of the rows of calls."""
_GLOO, _OPERATORS, _STEP = "gloo:", "aten::", "ProfilerStep#"
_UNBOUND = "unknown: the calls of {} of communication; such are replays of CUDA graphs, and coalesced calls"
NO_CALLS = (
    "unknown: what other libraries send (DeepEP, NVSHMEM, MPI), for torch.distributed issued no call; "
    "their kernels count as computation"
)
_EARLY = "{} of calls that were issued before the trace began"


@dataclass(slots=True)
class _Rows:
    """The rows of a trace that are used."""

    calls: list[KinetoCall] = field(default_factory=list)
    around: TimedRows = field(default_factory=TimedRows)
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    device_steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    kernels: KernelRows = field(default_factory=KernelRows)
    gloo: list[KinetoCall] = field(default_factory=list)
    computed: list[tuple[float, float]] = field(default_factory=list)


def read_kineto(path: Path, *, operators: bool = False) -> Trace:
    """The calls of a rank; with `operators` also when its host computed. Raises RequestError for no such trace."""
    stream = TraceEvents(path, partial(_wants_event, operators))
    with refuse_torn("trace", path, LEGAL):
        return trace_of(stream, stream.header, str(path))


def trace_of(events: Iterable[Json], header: Json, source: str) -> Trace:
    """The calls in these events. `header` has the other entries of the file, once all events were read."""
    rows = _Rows()
    for event in events:
        _take_event(rows, event)
    return _build_trace(source, header, rows)


def _wants_event(operators: bool, category: bytes, name: bytes) -> bool:
    if category in _CPU:
        return (
            (operators and name.startswith(_OPERATORS.encode()))
            or name == PARAMETERS.encode()
            or name.startswith((b"c10d::", b"nccl:", b"gloo:", b"ProfilerStep#"))
            or bool(kind_of(category.decode(), name.decode(errors="replace")))
        )
    if category == b"python_function":
        return bool(kind_of("python_function", name.decode(errors="replace")))
    if category in _LAUNCHING:
        return _GRAPH_LAUNCH in name
    return category in (b"kernel", b"fwdbwd") or (category == b"gpu_user_annotation" and b"ProfilerStep#" in name)


def _take_event(rows: _Rows, event: Json) -> None:
    """Keep what matters of an event."""
    category, name, phase = str(event.get("cat", "")), str(event.get("name", "")), event.get("ph", "X")
    if category == "fwdbwd" and phase == "s":
        start_us = float(event["ts"])
        rows.around.append(TimedRow(start_us, start_us, FORWARD, event.get("tid"), ""))
    if phase != "X":
        return
    start_us, end_us = _times_of_event(event, name)
    if category == "kernel":
        rows.kernels.append(name, start_us, end_us, event.get("args", {}))
    elif category.encode() in _LAUNCHING and _GRAPH_LAUNCH.decode() in name:
        rows.kernels.graphs.add(id_of(event.get("args", {}), "correlation"))
    elif name.startswith(_OPERATORS):
        rows.computed.append((start_us, end_us))
    elif name.startswith(_STEP):
        number = int(name.removeprefix(_STEP))
        if category == "gpu_user_annotation":
            extend_step(rows.device_steps, number, start_us, end_us)
        else:
            extend_step(rows.steps, number, start_us, end_us)
            rows.around.append(TimedRow(start_us, start_us, PROFILED, event.get("tid"), ""))
    elif category.encode() in _CPU and (role := _role_of_name(name)) is not None:
        fields = _kept_fields(event, name, role)
        rows.calls.append(KinetoCall(start_us, end_us, event.get("tid"), intern(name), role, fields))
    elif name.startswith(_GLOO):
        fields = _kept_fields(event, name, _BACKEND)
        rows.gloo.append(KinetoCall(start_us, end_us, event.get("tid"), intern(name), _BACKEND, fields))
    elif kind := kind_of(category, name):
        text = name.removeprefix("nn.Module: ")
        rows.around.append(TimedRow(start_us, end_us, kind, event.get("tid"), text))


def _times_of_event(event: Json, name: str) -> tuple[float, float]:
    """Start and end. Raises ValueError unless the duration is finite and not negative."""
    start_us, spent_us = float(event["ts"]), float(event.get("dur", 0.0))
    if spent_us < 0 or not math.isfinite(start_us + spent_us):
        raise ValueError(f"{name} at {start_us} lasts {spent_us} us, which must be at least 0")
    return start_us, start_us + spent_us


def _kept_fields(event: Json, name: str, role: int) -> Json:
    """The fields of a call's row that are used. Texts are interned, since a large trace has millions of them.

    The entries `dims` and `type` are those of the argument that is the payload, [] and "" if they were not recorded.
    """
    args = event.get("args", {})
    at, dims, types = _payload_at(name, role), args.get("Input Dims") or (), args.get("Input type") or ()
    payload = {"dims": dims[at] if 0 <= at < len(dims) else [], "type": str(types[at]) if 0 <= at < len(types) else ""}
    return payload | {
        intern(name): intern(value) if isinstance(value, str) else value
        for name, value in args.items()
        if name in _USED
    }


def _role_of_name(name: str) -> int | None:
    if name == PARAMETERS:
        return _FIELDS
    if name.startswith("nccl:"):
        return _BACKEND
    return _OPERATOR if name.startswith("c10d::") and operator_of(name) in OPERATORS else None


def operator_of(name: str) -> str:
    """torch's operator of a row: "allreduce_" of "c10d::allreduce_"."""
    return name.removeprefix("c10d::").partition(".")[0]


class RowsOfCall(NamedTuple):
    """The rows of one call: the one that has its fields, the operator around it, and the `External id` of every row."""

    comms_row: KinetoCall
    operator: KinetoCall | None
    ids: tuple[int, ...]


def rows_of_calls(rows: Sequence[KinetoCall]) -> list[RowsOfCall]:
    """The calls, in order of issue. A call inside of another one carries that one out, and does not count."""
    role = _FIELDS if any("Collective name" in row.args for row in rows) else _BACKEND
    found: list[RowsOfCall] = []
    for nested in _nested_rows(rows):
        operator = next((row for row in nested if row.role == _OPERATOR), None)
        ids = tuple(id_of(row.args, "External id") for row in nested)
        with_fields = list(_outermost_rows(nested, role))
        sending = [row for row in with_fields if row.args.get("Collective name") not in _NO_CALLS]
        if with_fields:
            found += [RowsOfCall(row, operator, ids if len(sending) == 1 else _own_ids(row, nested)) for row in sending]
        elif operator is not None:
            found.append(RowsOfCall(operator, operator, ids))
    return sorted(found, key=lambda call: call.comms_row.start_us)


def _nested_rows(rows: Sequence[KinetoCall]) -> Iterable[list[KinetoCall]]:
    """Each row that is in no other row of its thread, followed by all rows inside of it, in order of their start."""
    open_: dict[object, list[KinetoCall]] = {}
    roots: dict[int, list[KinetoCall]] = {}
    for row in sorted(rows, key=lambda row: (row.start_us, -row.end_us, row.role)):
        above = open_.setdefault(row.thread, [])
        while above and above[-1].end_us <= row.start_us:
            above.pop()
        roots.setdefault(id(above[0]) if above else id(row), []).append(row)
        above.append(row)
    return roots.values()


def _outermost_rows(nested: Sequence[KinetoCall], role: int) -> Iterator[KinetoCall]:
    """The rows of a role that are in no other row of this role."""
    end_us = -math.inf
    for row in nested:
        if row.role == role and row.end_us > end_us:
            end_us = row.end_us
            yield row


def _own_ids(row: KinetoCall, nested: Sequence[KinetoCall]) -> tuple[int, ...]:
    """The ids of a row and of all rows inside of it."""
    inside = [one for one in nested if one.start_us >= row.start_us and one.end_us <= row.end_us]
    return tuple(id_of(one.args, "External id") for one in inside)


def _build_trace(source: str, header: Json, rows: _Rows) -> Trace:
    about = header.get("distributedInfo") or {}
    groups = Groups(about.get("pg_config") or ())
    rank, world_size = _as_whole_number(about.get("rank")), _as_whole_number(about.get("world_size"))
    calls, gloo = rows_of_calls(rows.calls), sorted(rows.gloo, key=lambda row: row.start_us)
    found = places(rows.around, [_row_of(call, index) for index, call in enumerate(calls)])
    has_modules = rows.around.has(MODULE)
    kernels = rows.kernels.bind({one for call in calls for one in call.ids} - {NO_ID})
    lasted = [kernels.times_of(call.ids) for call in calls] if rows.kernels else _times_on_gloo(calls, gloo)
    steps = StepTimes(rows.steps)
    traced = tuple(
        replace(
            _build_call(call, groups, gloo),
            step=steps.at(call.comms_row.start_us),
            phase=place.phase,
            is_phase_annotated=place.annotated,
            module=_module_of_place(place) if has_modules else None,
            caller=_caller_of_frame(place.caller),
            device_start_us=times[0],
            device_us=times[1],
        )
        for call, place, times in zip(calls, found, lasted, strict=True)
    )
    _check_ranks(source, rank, world_size, traced)
    return Trace(
        source=source,
        format=TORCH,
        rank=rank,
        world_size=world_size,
        calls=traced,
        groups=groups.ranks,
        steps=build_steps(rows.steps, rows.device_steps, kernels),
        lost=_EARLY.format(_count_kernels(kernels.early)) if kernels.early else "",
        origin_us=float(header.get("baseTimeNanoseconds", 0)) / 1e3,
        computed=kernels.computation if rows.kernels else union(rows.computed),
        backend=str(about.get("backend", "")),
        notes=(
            *([_UNBOUND.format(_count_kernels(kernels.unbound))] if kernels.unbound else []),
            *([] if traced else [NO_CALLS]),
        ),
    )


def backend_word(op: str) -> str:
    """The name that gloo's own rows give to an op of the ledger."""
    return "all_reduce" if op == "reduce_scatter" else op


def _times_on_gloo(calls: Sequence[RowsOfCall], gloo: Sequence[KinetoCall]) -> list[tuple[float | None, float | None]]:
    """Start and duration of each call by gloo's own rows: those of the next row of its op; None without one."""
    rows: dict[str, Iterator[KinetoCall]] = {}
    by_name: dict[str, list[KinetoCall]] = {}
    for row in gloo:
        by_name.setdefault(row.name.removeprefix(_GLOO), []).append(row)
    found: list[tuple[float | None, float | None]] = []
    for call in calls:
        word = backend_word(_op_of_call(call))
        later = rows.setdefault(word, iter(by_name.get(word, ())))
        of_call = next((row for row in later if row.start_us >= call.comms_row.start_us), None)
        found.append((None, None) if of_call is None else (of_call.start_us, of_call.end_us - of_call.start_us))
    return found


def _count_kernels(kernels: int) -> str:
    return f"{kernels} kernel{'s' if kernels > 1 else ''}"


def _as_whole_number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _row_of(call: RowsOfCall, index: int) -> TimedRow:
    comms_row = call.comms_row
    name = _name_of_call(call)
    elements = _as_whole_number(comms_row.args.get("In msg nelems"))
    if elements is None:
        shapes = _payload_shapes(call)
        elements = sum(map(math.prod, shapes)) if shapes else -1
    return TimedRow(
        comms_row.start_us, comms_row.end_us, CALL, comms_row.thread, name, index, _op_of_call(call), elements
    )


def _name_of_call(call: RowsOfCall) -> str:
    return str(call.comms_row.args.get("Collective name") or call.comms_row.name)


def _op_of_call(call: RowsOfCall) -> str:
    if call.comms_row.role == _OPERATOR:
        return OPERATORS[operator_of(call.comms_row.name)].op
    return find_op(_name_of_call(call))


def _module_of_place(place: PlaceOfCall) -> str | None:
    """The modules around a call, "" for none; of backward, which runs in none, they are unknown."""
    return ".".join(place.modules) if place.modules or place.phase != "backward" else None


def _build_call(call: RowsOfCall, groups: Groups, gloo: Sequence[KinetoCall]) -> TracedCall:
    """A call, as its own rows state it."""
    comms_row, op = call.comms_row, _op_of_call(call)
    group = groups.of(comms_row.args)
    shapes, dtype = _payload_shapes(call), find_dtype(_dtype_word(call, gloo))
    elements = _count_elements(op, comms_row.args)
    if elements is not None:
        size = 0 if op == "barrier" else None if dtype is None else elements * dtype.item_bytes
        if shapes is not None and sum(map(math.prod, shapes)) != elements:
            shapes = None  # the recorded argument is not the payload
    else:
        size = 0 if op == "barrier" else payload_bytes(dtype, shapes)
    peer = comms_row.args.get("Dst Rank" if op == "send" else "Src Rank") if op in ("send", "recv") else None
    return TracedCall(
        op=op,
        name=_name_of_call(call),
        payload_bytes=size,
        dtype="" if dtype is None else dtype.name,
        shapes=shapes,
        group=group.ranks,
        group_name=group.name,
        group_desc=group.description,
        group_size=group.size,
        peer=_as_whole_number(peer),
        number=_as_whole_number(comms_row.args.get("Seq")),
        sizes_sent=_splits_of_value(comms_row.args.get("In split size")) if op == "all_to_all" else None,
        start_us=comms_row.start_us,
        host_us=comms_row.end_us - comms_row.start_us,
    )


def _count_elements(op: str, args: Mapping[str, Any]) -> int | None:
    """The number of elements of the payload, from the profiler's fields; None if they lack it."""
    elements = _as_whole_number(args.get(f"{'Out' if op in _OF_OUTPUT else 'In'} msg nelems"))
    if elements is not None and elements < 0:
        raise ValueError(f"a call has {elements} elements, which must be at least 0")
    return elements


def _payload_at(name: str, role: int) -> int:
    """The place of the payload among the arguments of an operator or a backend's row; -1 without one."""
    if role != _OPERATOR:
        return 0
    payload = OPERATORS[operator_of(name)].payload
    return 1 if payload.startswith("input") else 0 if payload else -1


def _payload_as_argument(row: KinetoCall) -> tuple[Any, str]:
    """Dims and type of the payload as an argument; [] and "" where they were not recorded."""
    return row.args["dims"], row.args["type"]


def _payload_shapes(call: RowsOfCall) -> tuple[tuple[int, ...], ...] | None:
    """The shapes of the payload where they were recorded."""
    for row in (call.operator, call.comms_row):
        if row is None or (row.role != _OPERATOR and _op_of_call(call) in _OF_OUTPUT):
            continue  # such a row has the input
        dims, word = _payload_as_argument(row)
        if dims or find_dtype(word):  # a scalar has no dims
            return tuple(_flatten_dims(dims))
    return None


def _flatten_dims(dims: Any) -> Iterator[tuple[int, ...]]:
    """The shapes in an argument's dims: of a tensor, a list of them, or a list of lists."""
    if all(isinstance(size, int) for size in dims):
        yield tuple(dims)
    else:
        for part in dims:
            yield from _flatten_dims(part)


def _dtype_word(call: RowsOfCall, gloo: Sequence[KinetoCall]) -> str:
    """The profiler's name of the dtype; for a list of tensors that of gloo's next row with the same dims."""
    if "dtype" in call.comms_row.args:
        return str(call.comms_row.args["dtype"])
    for row in (call.operator, call.comms_row):
        if row is not None and find_dtype(_payload_as_argument(row)[1]):
            return _payload_as_argument(row)[1]
    shapes = _payload_shapes(call) or ((),)
    first = bisect_left(gloo, call.comms_row.start_us, key=lambda row: row.start_us)
    later = (gloo[place] for place in range(first, len(gloo)))
    nearest = next((row for row in later if tuple(_flatten_dims(_payload_as_argument(row)[0])) == shapes[:1]), None)
    return "" if nearest is None else _payload_as_argument(nearest)[1]


def _splits_of_value(value: object) -> tuple[int, ...] | None:
    """The rows that an uneven all-to-all sends to each rank, () for an even one; None where the list is cut."""
    if not isinstance(value, str) or "..." in value:
        return None
    return tuple(int(one) for one in value.strip("[] ").split(",") if one.strip())


def _caller_of_frame(frame: str) -> str:
    """The function of the program around the call, "train.py:12": the line is that at which the function begins."""
    file, _, rest = frame.partition("(")
    return f"{file}:{rest.partition(')')[0]}" if rest else ""


def _check_ranks(source: str, rank: int | None, world_size: int | None, calls: Sequence[TracedCall]) -> None:
    """Raise RequestError for a rank that its world or the group of a call does not have."""
    if rank is None:
        return
    if rank < 0 or (world_size is not None and rank >= world_size):
        raise RequestError(f"trace {source}: is of rank {rank} in a world of {world_size} ranks; legal: {LEGAL}")
    for call in calls:
        if call.group and rank not in call.group:
            raise RequestError(
                f"trace {source}: is of rank {rank}, and calls in group {call.group_name} of ranks "
                f"{ranks_text(call.group)}; legal: {LEGAL}"
            )
