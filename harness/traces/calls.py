"""Calls of a rank as a trace tells them, in words that the readers of all formats share.

A trace seldom knows all of a call. What it does not know is None, or "" and () where the ledger has a text or a group,
and never 0. Payloads are counted as in the ledger (harness.ledger). Bytes, microseconds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardproof.harness.ledger import OTHER
from shardproof.harness.traces.intervals import Stretches

MOST_RANKS = 2**20
"""A larger world is no job: its ranks are listed in messages and tables."""

TORCH, FLIGHT_RECORDER, NSYS = "torch", "flight recorder", "nsys"
"""The formats of traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """A call of one rank. `name` is the format's own name of it, `op` the ledger's.

    `group` holds global ranks in group order; a trace may know the size of a group and not its ranks. `group_name` is
    torch's ("0", "11"), `group_desc` what the user called the group ("default_pg", "mesh_tp"). `shapes` has one shape
    for each tensor of the payload. `peer` is a root or the other end of a message as a global rank. `number` counts the
    calls of the group (`collective_seq_id`). `sizes_sent` is what this rank sends to each rank of the group, () where
    that is even, None where it is not known. `is_phase_annotated`: an annotation of the user says the phase. `module`
    is "" where the call was in none. `caller` is "file:line in function". `start_us` and `host_us` are the call on the
    host, `device_start_us` and `device_us` its kernel, or the row of gloo. `complete`: whether the trace saw it end.
    `batched`: whether a message was issued in a batch. `members` are the calls of which a coalesced one is made.
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
    is_async: bool | None = None
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
    """A step of the profiler. `device_us` is how long it took on the device, `compute_us` and `communication_us` the
    times in which that did each, `exposed_us` that in which it communicated and did not compute; None without kernels.
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
    call, "" for a trace that is whole. `clock` names the clock of the times: those of one clock can be compared.
    `origin_us` is where they count from. `computed` are stretches in which the device computed, on gloo the host.
    `backend` is that of torch.distributed ("nccl", "gloo"), "" where it is not told.
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
    clock: str = ""
    origin_us: float = 0.0
    computed: Stretches = ()
    backend: str = ""

    def within(self, steps: range) -> "Trace":
        """The trace of these steps alone."""
        kept = tuple(call for call in self.calls if call.step is not None and call.step in steps)
        return replace(self, calls=kept, steps=tuple(step for step in self.steps if step.number in steps), lost="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """A dtype by torch's Python name of it, and the bytes of an element."""

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
    """The bytes of tensors of these shapes, None where dtype or shapes are not known."""
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
