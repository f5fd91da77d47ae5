"""The calls of a rank in a trace, in terms that all readers share, and what a trace does not know.

A trace seldom knows all of a call. What it does not know is None, or "" and () where the ledger has a text or a group,
and never 0. `sentences` says what is unknown, and which option of the profiler records it. Payloads are counted as in
the ledger (harness.ledger). Units: bytes, microseconds.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardproof.harness.errors import name_ranks
from shardproof.harness.ledger import OTHER

Stretches = Sequence[tuple[float, float]]


def union(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same stretches of time, joined where they overlap, in order."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def covered_us(stretches: Stretches, start_us: float, end_us: float) -> float:
    """How much of the time from start to end these stretches cover. They do not overlap and are in order."""
    covered = 0.0
    for place in range(max(bisect_left(stretches, (start_us, 0.0)) - 1, 0), len(stretches)):
        start, end = stretches[place]
        if start >= end_us:
            break
        covered += max(0.0, min(end, end_us) - max(start, start_us))
    return covered


def minus(stretches: Stretches, others: Stretches) -> list[tuple[float, float]]:
    """The parts of `stretches` that are in none of the others. Both are in order and have no overlaps in themselves."""
    left, place = [], 0
    for start, end in stretches:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at, beside = start, place
        while beside < len(others) and others[beside][0] < end:
            if others[beside][0] > at:
                left.append((at, others[beside][0]))
            at = max(at, others[beside][1])
            beside += 1
        if at < end:
            left.append((at, end))
    return left


MOST_RANKS = 2**20
"""The largest world of a trace, since ranks are listed in messages and tables."""

TORCH, FLIGHT_RECORDER, NSYS = "torch", "flight recorder", "nsys"
"""The formats of traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """A call of one rank. `name` is the format's own name of it, `op` the ledger's.

    `group` holds global ranks in group order; a trace may know the size of a group and not its ranks. `group_name` is
    torch's ("0", "11"), `group_desc` what the user called the group ("default_pg", "mesh_tp"). `shapes` has one shape
    for each tensor of the payload. `peer` is the other end of a message as a global rank. `number` counts the calls of
    the group (`collective_seq_id`). `sizes_sent` is how many rows an all-to-all sends to each rank of the group, ()
    where that is even, None where it is not known. `is_phase_annotated`: an annotation of the user says the phase.
    `module` is "" where the call was in none. `caller` is "file:line", or "file:line in function". `start_us` and
    `host_us` are when the call began on the host and how long it took there, `device_start_us` and `device_us` those of
    its kernels, or of the row of gloo. `complete`: whether the trace saw it end. `batched`: whether a message was
    issued in a batch. `members` are the calls of which a coalesced one is made.
    """

    op: str
    name: str
    payload_bytes: int | None = None
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] | None = None
    reduce_op: str = ""
    group: tuple[int, ...] = ()
    group_name: str = ""
    group_desc: str = ""
    group_size: int | None = None
    peer: int | None = None
    number: int | None = None
    sizes_sent: tuple[int, ...] | None = None
    complete: bool | None = None
    batched: bool = False
    step: int | None = None
    phase: str = ""
    is_phase_annotated: bool = False
    module: str | None = None
    caller: str = ""
    start_us: float | None = None
    host_us: float | None = None
    device_start_us: float | None = None
    device_us: float | None = None
    members: tuple["TracedCall", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step of the profiler. `device_us` is its time on the device, `compute_us` and `communication_us` the times in
    which the device did each, `exposed_us` that in which it communicated and did not compute; None without kernels.
    """

    number: int
    start_us: float
    end_us: float
    device_us: float | None = None
    compute_us: float | None = None
    communication_us: float | None = None
    exposed_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The calls of one rank, in order of issue.

    `source` is the file, and `format` one of TORCH, FLIGHT_RECORDER, NSYS. `rank` and `world_size` are None where
    the file does not say. `groups` are the ranks of the groups by torch's name of them. `notes` are sentences on what
    the trace does not know and which option of its profiler records it. `lost` is what is missing before the first
    call, "" for a trace that is whole. `origin_us` is where times count from, on a clock of the trace's own. `computed`
    are stretches in which the device computed, on gloo the host. `backend` is that of torch.distributed ("nccl",
    "gloo"), "" where it is not told.
    """

    source: str
    format: str
    rank: int | None
    world_size: int | None
    calls: tuple[TracedCall, ...]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    steps: tuple[TracedStep, ...] = ()
    notes: tuple[str, ...] = ()
    lost: str = ""
    origin_us: float = 0.0
    computed: Stretches = ()
    backend: str = ""

    def within(self, steps: range) -> "Trace":
        """The trace of these steps alone."""
        kept = tuple(call for call in self.calls if call.step is not None and call.step in steps)
        return replace(self, calls=kept, steps=tuple(step for step in self.steps if step.number in steps), lost="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """A dtype by torch's Python name, and the bytes of an element."""

    name: str
    item_bytes: int


_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_DTYPES: Mapping[str, Dtype] = {
    word: Dtype(name=name, item_bytes=size)
    for name, size, words in (
        ("float64", 8, "double"),
        ("float32", 4, "float"),
        ("float16", 2, "half"),
        ("bfloat16", 2, "bfloat16"),
        ("int64", 8, "long,longint,longlong"),
        ("int32", 4, "int"),
        ("int16", 2, "short,shortint"),
        ("int8", 1, "char,signedchar"),
        ("uint8", 1, "byte,unsignedchar"),
        ("uint16", 2, ""),
        ("uint32", 4, "unsignedint"),
        ("uint64", 8, "unsignedlong"),
        ("bool", 1, "boolean"),
        ("complex64", 8, "complexfloat"),
        ("complex128", 16, "complexdouble"),
        *((name, 1, name.replace("_", "")) for name in _FLOAT8),
    )
    for word in (name, *words.split(","))
    if word
}


def find_dtype(word: str) -> Dtype | None:
    """The dtype of any spelling ("Float", "c10::BFloat16", "long int", "Float8_e4m3fn"); None for an unknown one."""
    plain = word.removeprefix("c10::").removeprefix("torch.").lower()
    return _DTYPES.get(plain) or _DTYPES.get(plain.replace(" ", ""))


def payload_bytes(dtype: Dtype | None, shapes: tuple[tuple[int, ...], ...] | None) -> int | None:
    """The bytes of tensors of these shapes, None if dtype or shapes are not known."""
    return None if dtype is None or shapes is None else dtype.item_bytes * sum(map(math.prod, shapes))


_OPS: Mapping[str, str] = {
    word: op
    for op, words in {
        "broadcast": "broadcast,broadcastoop",
        "all_reduce": "allreduce,allreducesparse,allreducecoalesced",
        "all_gather": "allgather,allgatherbase,allgatherintotensor,allgatherintotensorcoalesced,allgathercoalesced,"
        "allgatherv,allgathersingle",
        "reduce_scatter": "reducescatter,reducescatterbase,reducescattertensor,reducescattertensorcoalesced,"
        "reducescattercoalesced,reducescatterv,reducescattersingle",
        "all_to_all": "alltoall,alltoallv,alltoallbase,alltoallsingle,alltoallvsingle",
        "send": "send",
        "recv": "recv,recvanysource",
        "reduce": "reduce,reduceoop",
        "gather": "gather",
        "scatter": "scatter",
        "barrier": "barrier,allreducebarrier,monitoredbarrier,barriernode",
    }.items()
    for word in words.split(",")
}


def find_op(name: str) -> str:
    """The ledger's op of a format's name ("nccl:_all_gather_base", "allreduce", "ncclAllReduce", "nccl:send 0->1").

    A call of another name is "other".
    """
    word = name.rpartition(":")[2].partition(" ")[0].removeprefix("nccl").lower().replace("_", "")
    return _OPS.get(word, OTHER)


UNKNOWN = "?"
"""What the ledger has in place of a text that a trace does not know."""
_NEVER = "no option records it"
_FIELDS: Mapping[str, Callable[[TracedCall], bool]] = {
    "payload": lambda call: call.payload_bytes is None,
    "dtype": lambda call: not call.dtype and call.op != "barrier",
    "size of the group": lambda call: call.group_size is None,
    "ranks of the group": lambda call: not call.group,
    "step": lambda call: call.step is None,
    "phase": lambda call: not call.phase,
    "module": lambda call: call.module is None,
    "line": lambda call: not call.caller,
    "duration": lambda call: call.device_us is None,
    "reduce op": lambda call: not call.reduce_op and call.op in ("all_reduce", "reduce_scatter", "reduce"),
}
_OPTIONS: Mapping[str, Mapping[str, str]] = {
    TORCH: {
        "payload": "torch 2.2 and later record it always, earlier ones with profile(record_shapes=True)",
        "dtype": "torch 2.2 and later record it always, earlier ones with profile(record_shapes=True)",
        "size of the group": "torch 2.2 and later record it",
        "ranks of the group": "torch 2.4 and later record them in the header (pg_config)",
        "step": "call profiler.step() after every step",
        "phase": 'profile(with_stack=True), or record_function("forward") around it',
        "module": "profile(with_stack=True) names those of forward; backward runs in no module",
        "line": "profile(with_stack=True) names those that a Python function issued",
        "duration": "profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])",
        "reduce op": _NEVER,
    },
    FLIGHT_RECORDER: {
        "duration": "TORCH_NCCL_ENABLE_TIMING=1",
        "line": "TORCH_NCCL_TRACE_CPP_STACK=0 and TORCH_FR_BUFFER_SIZE above 0 record Python's stack",
    },
    NSYS: {"ranks of the group": "torch's profiler records them", "dtype": "torch's profiler records it"},
}
_BESIDE = "on gloo a dump of the Flight Recorder beside it does (shardproof record --profile torch writes both)"
_ON_GLOO: Mapping[str, str] = {
    **_OPTIONS[TORCH],
    **dict.fromkeys(("payload", "dtype", "size of the group", "ranks of the group"), _BESIDE),
    "duration": "gloo wrote no row of them",
}
_WHOLE_TRACE = "torch's profiler records it"


def sentences(traces: Sequence[Trace], world_size: int) -> list[str]:
    """What the traces do not know: a sentence for each field of calls, then the ranks without a trace, then for each
    trace what is missing before its first call, and its notes.
    """
    found = []
    for format_ in dict.fromkeys(trace.format for trace in traces):
        calls = [call for trace in traces if trace.format == format_ for call in trace.calls]
        lacking = Counter(name for call in calls for name, lacks in _FIELDS.items() if lacks(call))
        on_gloo = format_ == TORCH and all(trace.backend == "gloo" for trace in traces)
        options = _ON_GLOO if on_gloo else _OPTIONS.get(format_, {})
        for name in _FIELDS:
            if number := lacking[name]:
                option = options.get(name, _NEVER if name == "reduce op" else _WHOLE_TRACE)
                found.append(f"unknown: the {name} of {_count_of(number, len(calls))}; {option}")
    if number := sum(len(trace.calls) for trace in traces):
        found.append(f"unknown: the micro-batch of {_count_of(number, number)}; {_NEVER}")
    ranks = {trace.rank for trace in traces}
    if absent := [rank for rank in range(world_size) if rank not in ranks]:
        of = f"{name_ranks(absent)} of {world_size}, which left no trace"
        found.append(f"unknown: all calls of {of}; start the profiler on every rank")
    for trace in traces:
        found += [f"unknown: {trace.lost} (rank {trace.rank})"] if trace.lost else []
        found += [f"{note} (rank {trace.rank})" for note in trace.notes]
    return found


def _count_of(number: int, of: int) -> str:
    if of == 1:
        return "the only call"
    return f"all {of} calls" if number == of else f"{number} of {of} calls"
