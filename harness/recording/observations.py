"""Observations of a rank's program: modules entered and left, backward passes, optimizer steps, collectives issued.

The phase and the module of every call are inferred from these. They are recorded as plain tuples `(kind, *fields)`,
which cost a tenth of a microsecond, and are later read back as the named tuples below. A lane is a thread of the rank:
0 is the one that runs the rank's program.

An update without torch.optim makes no call that could be observed. It is recognised by the parameters themselves: a
few of their elements are compared between a backward and the next forward. These are three elements of at most four
parameters of each outermost module, which costs some microseconds a look. The version counter alone is not enough,
since `p.data.sub_(...)` does not change it. On other devices than the CPU only the counter is read.

Python runs once for a CUDA graph, in its capture, which computes nothing. A replay launches the captured kernels
without Python, so that no call is seen in it. The methods of torch.cuda.CUDAGraph are wrapped while the watch is
entered. Calls of a capture are kept by graph, and every replay repeats them as observations of its own. A graph that is
simulated on a CPU runs its Python inside of the replay, where nothing else is observed: the calls would count twice.
Graphs that are captured or launched in other ways than by these methods are not observed.
"""

import ctypes
import functools
import itertools
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from shardproof.harness.recording.annotations import Override
from shardproof.harness.torch_internals.autograd import version_of
from shardproof.harness.torch_internals.lookup import replace_attribute

Look = tuple[tuple[bytes | int, ...], ...]
"""For each parameter, in the order in which they were first seen: some of its elements, or its version counter."""

_PARAMETERS, _MOST = 4, 64
"""Parameters looked at in one outermost module, and in all of them."""
_PLAIN = (Tensor, nn.Parameter)


class _Looked:
    """A parameter that is looked at: its first, middle and last element, at their current address."""

    __slots__ = ("_address", "_cells", "_places", "moved", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.moved = False
        self._address = 0
        self._cells: list[Any] = []
        dims = list(zip(tensor.shape, tensor.stride(), strict=True))
        middle = sum(size // 2 * stride for size, stride in dims)
        last = sum((size - 1) * stride for size, stride in dims)
        self._places = tuple(place * tensor.element_size() for place in sorted({0, middle, last}))

    def values(self) -> tuple[bytes | int, ...]:
        """The bytes of the elements; the version counter if they are not on the CPU, or FSDP has freed the memory."""
        address = self.tensor.data_ptr()
        if address != self._address:
            self.moved = self.moved or bool(self._address)
            self._address, self._cells = address, []
            size, storage = self.tensor.element_size(), self.tensor.untyped_storage()
            begin = self.tensor.storage_offset() * size
            if self.tensor.is_cpu and begin + self._places[-1] + size <= storage.nbytes():
                self._cells = [(ctypes.c_char * size).from_address(address + place) for place in self._places]
        return tuple([cell.raw for cell in self._cells]) or (version_of(self.tensor),)


class Looks:
    """The parameters of one rank that are looked at, as long as `on` is True.

    An error while reading them sets `on` to False; the program goes on.
    """

    def __init__(self) -> None:
        self.on = True
        self._seen: set[int] = set()
        self._looked: list[_Looked] = []
        self._latest: Look = ()

    @property
    def moved(self) -> bool:
        """Whether a parameter has another address than at first: an update by hand has replaced its tensor."""
        return any(looked.moved for looked in self._looked)

    def at(self, model: nn.Module | None = None) -> Look:
        """The values now: the same object as last time if nothing changed. Parameters of a new `model` are added."""
        try:
            if model is not None and id(model) not in self._seen:
                self._seen.add(id(model))
                self._add(model)
            now = tuple([looked.values() for looked in self._looked])
        except Exception:  # a tensor subclass may raise anything
            self.on = False
            return ()
        if now != self._latest:
            self._latest = now
        return self._latest

    def _add(self, model: nn.Module) -> None:
        if len(self._looked) >= _MOST:
            return
        known = {id(looked.tensor) for looked in self._looked}
        trained = [_local(parameter) for parameter in model.parameters() if parameter.requires_grad]
        plain = [part for part in trained if type(part) in _PLAIN and part.numel()]
        if len(plain) > _PARAMETERS:  # some of them, from the first to the last
            plain = [plain[place * (len(plain) - 1) // (_PARAMETERS - 1)] for place in range(_PARAMETERS)]
        self._looked += [_Looked(part) for part in plain if id(part) not in known]


def differ(before: Look, now: Look) -> bool:
    """Whether a parameter changed. One that only the later look has is new, and does not count."""
    return before is not now and any(then != value for then, value in zip(before, now, strict=False))


_SHARED = ("allreduce", True)
"""The attribute that says whether data ranks hold copies of a parameter, and its default."""


class ParameterMemory:
    """The memory of the parameters of some models; `parameter_bytes` are those of this rank's parts of them.

    Experts that Megatron-Core and DeepSpeed mark with allreduce=False are left out: data ranks hold no copies of these
    to gather. `of` reads the memory, often after the run. If parameters have `moved`, no address is known to be theirs.
    """

    def __init__(self) -> None:
        self.parameter_bytes = 0
        self.moved = False
        self._models = 0
        self._starts: list[int] = []
        self._ends: list[int] = []

    def of(self, models: Sequence[nn.Module]) -> Self:
        """This memory, read anew when there are more models than before."""
        if len(models) > self._models:
            self._models = len(models)
            self._read_parameters([*{id(p): p for model in models for p in model.parameters()}.values()])
        return self

    def _read_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        parts = [*map(_local, parameters)]
        shared = [part for part, parameter in zip(parts, parameters, strict=True) if getattr(parameter, *_SHARED)]
        self.parameter_bytes = sum(part.numel() * part.element_size() for part in shared)
        storages = [part.untyped_storage() for part in parts if type(part) in _PLAIN and part.device.type != "meta"]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self._starts = sorted(sizes)
        self._ends = [start + sizes[start] for start in self._starts]

    def mostly_in(self, gathered_bytes: int) -> bool:
        """Whether gathers of this many bytes may be of parameters: of half of the parameters' bytes or more.

        ZeRO-3 of DeepSpeed frees parameters that are not in use: their size is 0 then, and any gather may be of them.
        """
        return bool(self._models) and 2 * gathered_bytes >= self.parameter_bytes

    def holds(self, address: int) -> bool:
        """Whether a parameter's storage has this address, as far as that is known."""
        index = bisect_right(self._starts, address) - 1
        return not self.moved and bool(address) and index >= 0 and address < self._ends[index]


def _local(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor, any other tensor as it is."""
    to_local: Callable[[], Tensor] | None = getattr(parameter, "to_local", None)
    if to_local is None:
        return parameter
    with torch.no_grad():  # then it is the part itself, and no node of autograd is made
        return to_local()


OUTSIDE = -1
"""The graph task when no backward runs, and the node number when no node runs."""
LEAF = 2**64 - 1
"""The sequence number that autograd gives to every AccumulateGrad node."""


class Entered(NamedTuple):
    """A module's call began; `outermost` when none was going on in this lane.

    `number`: the sequence number that the next autograd node of this thread will get. `task`: the graph task that runs
    in this thread. `node`: the number of the node that runs in it. Of outermost calls alone: `grad`, whether gradients
    were on; `look` (see Looks), () inside of a backward and after an optimizer's step; `at_s`, the time.
    """

    lane: int
    number: int
    task: int
    node: int
    module: nn.Module
    outermost: bool
    grad: bool
    look: Look
    at_s: float


class Left(NamedTuple):
    """The module entered last in this lane returned, or an exception left it (`raised`)."""

    lane: int
    number: int
    raised: bool


class Arrived(NamedTuple):
    """Backward reached the output of an outermost module: `node` is the number of its node, made in lane `made_in`."""

    lane: int
    task: int
    node: int
    made_in: int
    at_s: float


class Ended(NamedTuple):
    """The backward of an `Arrived` is over. Observed only while profiler ranges are recorded."""

    lane: int
    task: int


class Stepping(NamedTuple):
    """An optimizer step began inside of `depth` others: an optimizer's step may call that of its base or of another."""

    lane: int
    task: int
    depth: int
    at_s: float


class Stepped(NamedTuple):
    """The optimizer step ended; one that a CUDA graph `captured` has updated nothing."""

    lane: int
    captured: bool


class Graphed(NamedTuple):
    """The CUDA graph of a call: its name, the call's ticket in the capture, the replay's number (-1: capture)."""

    graph: str
    captured: int
    replay: int


class Issued(NamedTuple):
    """A collective was issued; `ticket` is its index on the rank, `call` and `caller` what the recorder keeps of it.

    `parameter`: whose gradient accumulates, when a leaf's node runs. `quiet`: gradients are off inside an outermost
    module without parameters. `again`: activation checkpointing runs a plain function again. `outer`: the number of the
    node that started this backward inside of another one. `look`: as that of Entered, () inside of modules too.
    `graphed`: the CUDA graph in whose capture or replay it is. `copies`: it gathers a full copy of a DTensor.
    """

    lane: int
    task: int
    node: int
    parameter: Tensor | None
    quiet: bool
    again: bool
    outer: int
    override: Override
    ticket: int
    look: Look
    started_s: float
    call: Any
    caller: Any
    graphed: Graphed | None
    copies: bool


class Finished(NamedTuple):
    """The rank's program returned or raised; `look`: as that of Entered, `moved`: parameters came to lie elsewhere."""

    lane: int
    look: Look
    moved: bool


Observation = Entered | Left | Arrived | Ended | Stepping | Stepped | Issued | Finished


def read_observation(plain: tuple[Any, ...]) -> Observation:
    """The observation that was recorded as a plain tuple, its kind first."""
    seen: Observation = plain[0]._make(plain[1:])
    return seen


class Captured:
    """A graph: the calls of its capture as (ticket, call, caller), and whether an optimizer stepped in it."""

    __slots__ = ("calls", "name", "replays", "steps")

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[int, Any, Any]] = []
        self.steps = False
        self.replays = 0

    def replay(self, lane: int, task: int, node: int, tickets: Iterator[int]) -> Iterator[tuple[Any, ...]]:
        """The observations of one more replay in this lane: every call again, then the step of its optimizer."""
        number, self.replays = self.replays, self.replays + 1
        for of_capture, call, caller in self.calls:
            again, at_s = Graphed(self.name, of_capture, number), time.perf_counter()
            place = node, None, False, False, OUTSIDE, (None, None)
            yield Issued, lane, task, *place, next(tickets), (), at_s, call, caller, again, False
        if self.steps:
            yield Stepping, lane, task, 0, time.perf_counter()
            yield Stepped, lane, False


class Graphs:
    """The graphs of one rank, named in the order of their captures: graph0, graph1."""

    __slots__ = ("_known", "_numbers", "capturing")

    def __init__(self) -> None:
        self.capturing: Captured | None = None
        self._known: dict[int, Captured] = {}
        self._numbers = itertools.count()

    def begin(self, graph: object) -> None:
        """A capture begins. It replaces an earlier one of the same graph."""
        self.capturing = self._known[id(graph)] = Captured(f"graph{next(self._numbers)}")

    def end(self) -> None:
        """The capture is over."""
        self.capturing = None

    def of(self, graph: object) -> Captured | None:
        """Capture of a graph, None where none was seen."""
        return self._known.get(id(graph))

    def mark(self, ticket: int, call: Any, caller: Any) -> Graphed | None:
        """Mark a call of the running capture as one of the graph; None outside of captures."""
        if self.capturing is None:
            return None
        self.capturing.calls.append((ticket, call, caller))
        return Graphed(self.capturing.name, ticket, -1)


@contextmanager
def watch_graphs(lane: Callable[[], Any]) -> Iterator[None]:
    """While entered, report captures and replays to the ThreadWatch that `lane` returns for the calling thread."""
    owner = torch.cuda.CUDAGraph
    before = {name: vars(owner)[name] for name in ("capture_begin", "capture_end", "replay") if name in vars(owner)}

    def capture_begin(graph: Any, *args: Any, **words: Any) -> Any:
        if (mine := lane()) is not None:
            mine.graphs.begin(graph)
        return before["capture_begin"](graph, *args, **words)

    def capture_end(graph: Any, *args: Any, **words: Any) -> Any:
        try:
            return before["capture_end"](graph, *args, **words)
        finally:
            if (mine := lane()) is not None:
                mine.graphs.end()

    def replay(graph: Any, *args: Any, **words: Any) -> Any:
        mine = lane()
        captured = None if mine is None else mine.graphs.of(graph)
        if mine is None or captured is None:
            return before["replay"](graph, *args, **words)
        emit, mine.emit = mine.emit, lambda _plain: None  # Python that runs inside of a replay
        try:
            result = before["replay"](graph, *args, **words)
        finally:
            mine.emit = emit
        mine.record_replay(captured)
        return result

    made = {function.__name__: function for function in (capture_begin, capture_end, replay)}
    with ExitStack() as undo:
        for name, original in before.items():
            undo.enter_context(replace_attribute(owner, name, functools.wraps(original)(made[name])))
        yield
