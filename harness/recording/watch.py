"""Watches modules, optimizers and backward from outside, and records what every rank's program does.

While it is entered, `nn.Module._call_impl` is wrapped. Global forward hooks cost three times as much a call and end
before a module's own forward hooks, in which DTensor's plans communicate. Wrapping `__call__` itself makes Python look
up the slots of every module class again, half a millisecond a run. Optimizers are observed by torch's global step
hooks. A prehook on the node of an outermost output reports that backward arrived; it adds no node and reads nothing.
torch.compile skips the wrapper or traces it to nothing, so compiled code is the same. A module whose `module.compile()`
was called before is not observed, since the compiled call replaces `_call_impl`.

Every rank of a process has its own thread, which enters `on_rank`. Other threads (autograd's for a device, workers)
belong to the rank if it is the only one in the process.

What surrounds a call (user code, checkpoints, recomputation, another backward, optimizer steps) is read from the Python
stack. Frames are compared by their code objects only, since reading a frame's variables keeps them alive as long as the
frame. The frame of a Function's own forward or backward is read, since it ends soon.
"""

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import checkpoint

from shardproof.harness.engines.calls.callers import is_user, issued_at
from shardproof.harness.recording.annotations import overridden
from shardproof.harness.recording.observations import (
    LEAF,
    OUTSIDE,
    Arrived,
    Captured,
    Ended,
    Entered,
    Finished,
    Graphs,
    Issued,
    Left,
    Looks,
    Stepped,
    Stepping,
    watch_graphs,
)
from shardproof.harness.torch_internals.autograd import (
    BACKWARD,
    STEP,
    called_by,
    current_node,
    current_task,
    defined_in,
    function_context,
    next_number,
    nodes_of,
    number_of,
    when_backward_ends,
)
from shardproof.harness.torch_internals.compiler import not_compiled

_CHECKPOINT = checkpoint.__file__
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_SAVES = os.path.join(_TORCH, "distributed", "checkpoint", ""), torch.serialization.__file__


def surroundings(frame: FrameType | None, *, in_backward: bool) -> tuple[tuple[CodeType, int] | None, bool, int]:
    """The caller in user code; in backward also whether checkpointing runs a function again, and the outer node.

    The outer node is the node of another backward that started this one; OUTSIDE if there is none. The caller is a
    plain code and line (callers.Caller), since every call pays for this, about a microsecond.
    """
    caller, again = issued_at(frame), False
    while in_backward and frame is not None:
        code = frame.f_code
        if code is BACKWARD:
            return caller, again, OUTSIDE if again else _outer(frame)
        again = again or code.co_filename == _CHECKPOINT
        frame = frame.f_back
    return caller, again, OUTSIDE


def _outer(frame: FrameType) -> int:
    """The number of the node whose backward called the backward that runs in `frame`."""
    caller: FrameType | None = frame
    for _caller in range(3):
        caller = None if caller is None else caller.f_back
        if caller is not None and caller.f_code.co_name == "backward" and caller.f_code.co_varnames[:1] == ("ctx",):
            return number_of(caller.f_locals["ctx"])
    return OUTSIDE


def quiet_since(frame: FrameType | None, until: CodeType) -> bool:
    """Whether the user turned gradients off, by the frames up to `until`. False if they are off only because the
    forward of an autograd Function runs.
    """
    inner = None
    while frame is not None and frame.f_code is not until:
        in_forward, context = function_context(frame, inner)
        if in_forward:
            # The node of a Function that requires gradients passes them to nothing if they were off around it.
            return any(getattr(context, "needs_input_grad", ())) and not getattr(context, "next_functions", ())
        inner, frame = frame, frame.f_back
    return True


def kept_by_torch(frame: FrameType | None) -> tuple[bool, bool]:
    """(whether torch saves or loads a checkpoint or a state_dict, whether it makes a full copy of a DTensor).

    Searched are torch's own frames up to the user's line: `torch.distributed.checkpoint`, `torch.load`, `state_dict`
    and its like.
    """
    copies = False
    while frame is not None and not is_user(frame.f_code.co_filename):
        if saves_or_loads(frame.f_code):
            return True, copies
        copies = copies or frame.f_code.co_name == "full_tensor"
        frame = frame.f_back
    return False, copies


def saves_or_loads(code: CodeType) -> bool:
    """Whether this is a function of torch that saves or loads a checkpoint or a state_dict."""
    file = code.co_filename
    return file.startswith(_SAVES) or (code.co_name.endswith("state_dict") and file.startswith(_TORCH))


def steps_around(frame: FrameType | None) -> int:
    """How many optimizer steps are in progress."""
    count = 0
    while frame is not None:
        count += frame.f_code is STEP
        frame = frame.f_back
    return count


Emit = Callable[[tuple[Any, ...]], object]
OnInput = Callable[["ThreadWatch", nn.Module, tuple[Any, ...], Mapping[str, Any]], object]
OnOutput = Callable[["ThreadWatch", nn.Module, Any], object]
OnCall = tuple[OnInput | None, OnOutput | None]

_task, _node, _number = current_task, current_node, next_number
_grad = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling
_now_s = time.perf_counter


class ThreadWatch:
    """A thread of one rank: where its observations go, and which module is outermost in it."""

    __slots__ = (
        "bare",
        "depth",
        "emit",
        "graphs",
        "looks",
        "number",
        "on_input",
        "on_output",
        "outer",
        "rank",
        "tickets",
    )

    def __init__(self, rank: int, number: int, emit: Emit, on_call: OnCall, of_rank: "OfRank") -> None:
        self.rank = rank
        self.number = number
        self.emit: Emit | None = emit
        self.on_input, self.on_output = on_call
        self.tickets = of_rank.tickets
        self.looks = of_rank.looks
        self.graphs = of_rank.graphs
        self.depth = 0
        self.outer: nn.Module | None = None
        self.bare: bool | None = None

    def issue(self, call: object, frame: FrameType) -> int:
        """Record that a call is issued in this thread, by the code of `frame`. Kept fast: every call runs it."""
        task = _task()
        node, parameter, quiet = OUTSIDE, None, False
        if task != OUTSIDE:
            running = _node()
            if running is not None:
                node = number_of(running)
                if node == LEAF:
                    parameter = running.variable
        elif self.depth and self.bare is not False and not _grad() and self._outer_is_bare():
            quiet = quiet_since(frame, WATCHING)
        caller, again, outer = surroundings(frame, in_backward=task != OUTSIDE and not self.depth)
        ticket = next(self.tickets)
        if self.emit is not None:
            override, lane, copies = overridden(), self.number, False
            if task == OUTSIDE and not self.depth:
                saves, copies = kept_by_torch(frame)
                override = ("checkpoint", override[1]) if saves and override[0] is None else override
            look = self.looks.at() if self.looks.on and task == OUTSIDE and not self.depth else ()
            marked = self.graphs.mark(ticket, call, caller)
            at = node, parameter, quiet, again, outer, override, ticket, look, _now_s(), call, caller, marked, copies
            self.emit((Issued, lane, task, *at))
        return ticket

    def record_replay(self, captured: Captured) -> None:
        """Record that a CUDA graph was replayed."""
        if self.emit is not None:
            for plain in captured.replay(self.number, _task(), running_node(), self.tickets):
                self.emit(plain)

    def _outer_is_bare(self) -> bool:
        if self.bare is None:
            self.bare = self.outer is not None and next(self.outer.parameters(), None) is None
        return self.bare


class OfRank(NamedTuple):
    """State that the lanes of a rank share: the numbers of lanes and calls, looks at parameters, CUDA graphs."""

    numbers: Iterator[int]
    tickets: Iterator[int]
    looks: Looks
    graphs: Graphs


def reporting_call(
    local: threading.local,
    adopt: Callable[[], ThreadWatch | None],
    arrival: Callable[[ThreadWatch, int], Callable[[object], None]],
    original: Callable[..., Any],
) -> Callable[..., Any]:
    """A module's call, with reports when the module is entered and left. Kept fast: every module call runs it."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _compiling():
            return original(module, *args, **kwargs)
        try:
            lane = local.lane
            emit = lane.emit
        except AttributeError:
            lane = emit = None
        if emit is None:
            lane = adopt()
            if lane is None:
                return original(module, *args, **kwargs)
            emit = lane.emit
        depth = lane.depth
        lane.depth = depth + 1
        task = _task()
        if depth:
            node = OUTSIDE if task == OUTSIDE else running_node()
            emit((Entered, lane.number, _number(), task, node, module, False, True, (), 0.0))
        else:
            lane.outer, lane.bare = module, None
            node = OUTSIDE if task == OUTSIDE else running_node()
            look = lane.looks.at(module) if task == OUTSIDE and lane.looks.on else ()
            emit((Entered, lane.number, _number(), task, node, module, True, _grad(), look, _now_s()))
        raised = True
        try:
            if lane.on_input is not None:
                lane.on_input(lane, module, args, kwargs)
            output = original(module, *args, **kwargs)
            if lane.on_output is not None:
                lane.on_output(lane, module, output)
            if not depth and task == OUTSIDE:
                for node in nodes_of(output):
                    node.register_prehook(arrival(lane, number_of(node)))
            raised = False
            return output
        finally:
            lane.depth = depth
            emit((Left, lane.number, _number(), raised))

    return call


WATCHING = defined_in(reporting_call)
not_compiled(WATCHING)


def running_node() -> int:
    """Number of the autograd node that runs in this thread."""
    node = _node()
    return OUTSIDE if node is None else number_of(node)


class Watch:
    """Passes every observation of every rank to `emit(rank)`, a function that takes plain tuples (`read_observation`).

    `on_output(lane, module, output)`, if given, receives the output of every module call before its Left is emitted,
    and `on_input(lane, module, args, kwargs)` its arguments after its Entered. With `ends`, the end of every backward
    is observed too.
    """

    def __init__(
        self,
        emit: Callable[[int], Emit],
        on_output: OnOutput | None = None,
        *,
        on_input: OnInput | None = None,
        ends: bool = False,
    ) -> None:
        self._emit = emit
        self._on_call = on_input, on_output
        self._ends = ends
        self._local = threading.local()
        self._open: dict[int, list[ThreadWatch]] = {}
        self._ranks: dict[int, OfRank] = {}
        self._installed = ExitStack()

    def __enter__(self) -> Self:
        watched = partial(reporting_call, self._local, self._adopt, self._arrival)
        self._installed.enter_context(called_by(watched))
        self._installed.enter_context(watch_graphs(self._mine))
        self._installed.callback(register_optimizer_step_pre_hook(self._on_step_begin).remove)
        self._installed.callback(register_optimizer_step_post_hook(self._on_step_end).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._installed.close()

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        """Mark this thread as running the program of a rank, until the context is left."""
        before: ThreadWatch | None = getattr(self._local, "lane", None)
        mine = self.lane(rank)
        try:
            yield
        finally:
            if mine.looks.on and mine.emit is not None:
                mine.emit((Finished, mine.number, mine.looks.at(), mine.looks.moved))
            for lane in self._open.pop(rank):
                lane.emit = None
            self._local.lane = before

    def lane(self, rank: int) -> ThreadWatch:
        """The lane of this thread on a rank, created on first use."""
        lane: ThreadWatch | None = getattr(self._local, "lane", None)
        if lane is None or lane.emit is None or lane.rank != rank:
            of_rank = self._ranks.get(rank)
            if of_rank is None:
                of_rank = self._ranks.setdefault(rank, OfRank(itertools.count(), itertools.count(), Looks(), Graphs()))
            lane = ThreadWatch(rank, next(of_rank.numbers), self._emit(rank), self._on_call, of_rank)
            self._local.lane = lane
            self._open.setdefault(rank, []).append(lane)
        return lane

    def _adopt(self) -> ThreadWatch | None:
        """The lane of a thread that entered no rank: that of the process's only rank; None if there are several."""
        ranks = list(self._open)
        return self.lane(ranks[0]) if len(ranks) == 1 else None

    def _mine(self) -> ThreadWatch | None:
        lane: ThreadWatch | None = getattr(self._local, "lane", None)
        return lane if lane is not None and lane.emit is not None else self._adopt()

    def _arrival(self, made_in: ThreadWatch, number: int) -> Callable[[object], None]:
        """The prehook of the node of an outermost output."""
        rank, lane_number = made_in.rank, made_in.number

        def on_arrival(_gradients: object) -> None:
            lane = self._mine()
            if lane is None or lane.emit is None or lane.rank != rank:
                return
            task = current_task()
            lane.emit((Arrived, lane.number, task, number, lane_number, _now_s()))
            if self._ends:
                when_backward_ends(lambda: self._on_task_end(task))

        return on_arrival

    def _on_task_end(self, task: int) -> None:
        lane = self._mine()
        if lane is not None and lane.emit is not None:
            lane.emit((Ended, lane.number, task))

    def _on_step_begin(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        lane = self._mine()
        if lane is not None and lane.emit is not None:
            lane.emit((Stepping, lane.number, current_task(), steps_around(sys._getframe(1)) - 1, _now_s()))

    def _on_step_end(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        lane = self._mine()
        if lane is not None and lane.emit is not None:
            lane.looks.on = False  # the step of an optimizer ended
            if (captured := lane.graphs.capturing) is not None:
                captured.steps = True
            lane.emit((Stepped, lane.number, captured is not None))
