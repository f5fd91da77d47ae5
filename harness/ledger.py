"""The ledger: every collective call on every rank, one event a call, and the one list of columns.

Units: bytes, microseconds. Payloads: all_reduce the tensor; all_gather the gathered output; reduce_scatter the full
input; all_to_all one rank's total send; broadcast, send, recv the tensor. Wire bytes follow the ring model per rank.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

AGAIN = "recompute"
"""The phase of what backward recomputes."""
BACKWARD = ("backward", AGAIN)
PASSES = ("forward", *BACKWARD)
PHASES = ("data", "forward", "loss", *BACKWARD, "pipeline", "grad_sync", "metric", "step", "checkpoint")
NO_UPDATE = "step: no optimizer of torch.optim stepped and no parameter was seen to change, so all is in step 0"
"""The doubt of a run whose forwards look like micro-batches of one step."""
EITHER_GATHER = "phase: a gather before parameters changed by hand is grad_sync, and may be one of updated parameters"
NO_PHASE = (
    "the phase of these calls is unknown, so they count as data: no module, backward or optimizer was seen beside "
    'them; wrap them in `with shardproof.phase("forward")`'
)
OPS = (
    "broadcast",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send",
    "recv",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "other",
)
"""`other` is an operator of torch that shardproof does not know: its payload is all its tensor arguments."""
OTHER = OPS[-1]
REDUCE_OPS = ("sum", "avg", "max", "min", "product", "")
_RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def order_of_phase(phase: str) -> int:
    """The place of a phase in a step of training. Recomputation belongs to backward; unknown phases come last."""
    phase = "backward" if phase in BACKWARD else phase
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective as one rank issues it, seen by the engine's group or the interposer, before it runs.

    `shapes` has one shape for each tensor of the payload, here of two: ((4, 8), (4,)). `group` holds the
    global ranks in group order; `group_desc` is what the user called the group ("tp", "mesh_tp"). `peer` is the group's
    root or the other end of a point-to-point call as a global rank, -1 when there is none. `device` is the type of
    device that the payload is on; where there is no payload, the host. `operator` is torch's name of an operator whose
    op is `other`: "c10d::shuffle_". `address` is where an all_gather or a broadcast writes first in memory, 0 for other
    calls and where there is no memory. `needs_gradient`: autograd wants the gradient of what an all_to_all or a
    reduce_scatter sends; False where that is not certain, and of others. `computed`: autograd computed what it sends.
    """

    op: str
    reduce_op: str
    group: tuple[int, ...]
    group_desc: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    payload_bytes: int
    is_async: bool
    peer: int = -1
    device: str = "cpu"
    operator: str = ""
    address: int = 0
    needs_gradient: bool = False
    computed: bool = False


class Observer(Protocol):
    """Observer of the calls of the ranks: the recorder, a fault injector's log, a test.

    A method on_wait(rank, ticket), where there is one, is called at the first wait for an asynchronous call.
    """

    def on_issue(self, rank: int, call: Call) -> int:
        """A rank is about to issue this call; the ticket returned comes back in `on_completion`."""
        ...

    def on_completion(self, rank: int, ticket: int) -> None:
        """The call behind the ticket has completed on this rank: its wait returned; on a GPU, in the current stream."""
        ...


def notify_waited(observer: Observer, rank: int, ticket: int) -> None:
    """Notify an observer that has a method for it that the program waits for this asynchronous call."""
    if (notify := getattr(observer, "on_wait", None)) is not None:
        notify(rank, ticket)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A call on one rank; all fields but those of _UNWRITTEN are the columns of `ledger.csv`, in its order.

    `graph` names the CUDA graph whose replay sent it ("graph0"), "" where the program itself did. `group` holds the
    global ranks of the call's group; the file names the group by `axis`. `operator` is torch's name of an operator
    whose op is `other`; only messages have it. `doubts` are sentences on what is not certain of its axis, step
    or phase. `needs_gradient` is that of its call, but False where no backward follows that forward. `sent_rows`, of an
    all_to_all of a recorded program: the rows that this rank sends to each rank of the group, in its order ("3+0+5").
    """

    case: str
    mode: str
    world_size: int
    rank: int
    step: int
    microbatch: int
    phase: str
    region: str
    op: str
    reduce_op: str
    axis: str
    group_size: int
    dtype: str
    shape: str
    payload_bytes: int
    wire_bytes: int
    is_async: bool
    call_index: int
    start_us: float
    duration_us: float
    caller: str
    group: tuple[int, ...]
    graph: str = ""
    operator: str = ""
    doubts: tuple[str, ...] = ()
    needs_gradient: bool = False
    sent_rows: str = ""


_UNWRITTEN = {"group", "operator", "doubts", "needs_gradient", "sent_rows"}
COLUMNS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Event) if f.name not in _UNWRITTEN)
REPEATABLE = tuple(name for name in COLUMNS if name not in {"start_us", "duration_us", "caller"})
"""The columns that are equal in every run of a case, on every engine and in every release."""


def name_unmapped_operators(events: Iterable[Event]) -> str:
    """The operators of torch whose op is `other`, by name: "c10d::shuffle_, c10d::swap_"; "" when there are none."""
    return ", ".join(dict.fromkeys(event.operator for event in events if event.op == OTHER))


def shape_text(shapes: tuple[tuple[int, ...], ...]) -> str:
    """Shapes as the ledger prints them: "4x2048x1024", "4x8+4" for two coalesced tensors, "" for a scalar's ()."""
    return "+".join("x".join(map(str, shape)) for shape in shapes)


def wire_bytes(op: str, payload_bytes: int, group_size: int) -> int:
    """Bytes one rank puts on the wire under the ring model; 0 in a group of one; rounded down to whole bytes."""
    if group_size == 1:
        return 0
    return _RING[op] * (group_size - 1) * payload_bytes // group_size if op in _RING else payload_bytes
