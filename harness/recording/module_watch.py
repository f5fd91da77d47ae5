"""Reports of one thread of a rank on its modules and calls while a watch is entered.

A replacement of a module's call reports when the module is entered and left.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from shardproof.harness.recording.annotations import overridden
from shardproof.harness.recording.enclosing import around, kept_by, quiet_since
from shardproof.harness.recording.graphs import Captured, Graphs
from shardproof.harness.recording.observations import LEAF, OUTSIDE, Entered, Issued, Left, Looks
from shardproof.harness.torch_internals.autograd import (
    current_node,
    current_task,
    defined_in,
    next_number,
    nodes_of,
    number_of,
)
from shardproof.harness.torch_internals.compiler import not_compiled

Emit = Callable[[tuple[Any, ...]], object]
OnInput = Callable[["ThreadWatch", nn.Module, tuple[Any, ...], Mapping[str, Any]], object]
OnOutput = Callable[["ThreadWatch", nn.Module, Any], object]
OnCall = tuple[OnInput | None, OnOutput | None]

_task, _node, _number = current_task, current_node, next_number
_grad = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling
_now_s = time.perf_counter


class ThreadWatch:
    """A thread of one rank: where its observations go, and what module is outermost in it."""

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
        """Record that a call is issued in this thread, by the code of `frame`. Every microsecond in it counts."""
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
        caller, again, outer = around(frame, in_backward=task != OUTSIDE and not self.depth)
        ticket = next(self.tickets)
        if self.emit is not None:
            override, lane, copies = overridden(), self.number, False
            if task == OUTSIDE and not self.depth:
                saves, copies = kept_by(frame)
                override = ("checkpoint", override[1]) if saves and override[0] is None else override
            look = self.looks.at() if self.looks.on and task == OUTSIDE and not self.depth else ()
            marked = self.graphs.mark(ticket, call, caller)
            at = node, parameter, quiet, again, outer, override, ticket, look, _now_s(), call, caller, marked, copies
            self.emit((Issued, lane, task, *at))
        return ticket

    def replayed(self, captured: Captured) -> None:
        """Record that a CUDA graph was replayed."""
        if self.emit is not None:
            for plain in captured.replay(self.number, _task(), running_node(), self.tickets):
                self.emit(plain)

    def _outer_is_bare(self) -> bool:
        if self.bare is None:
            self.bare = self.outer is not None and next(self.outer.parameters(), None) is None
        return self.bare


class OfRank(NamedTuple):
    """State that the lanes of a rank share: the numbers of lanes and of calls, looks at parameters, CUDA graphs."""

    numbers: Iterator[int]
    tickets: Iterator[int]
    looks: Looks
    graphs: Graphs


def watching(
    local: threading.local,
    adopt: Callable[[], ThreadWatch | None],
    arrival: Callable[[ThreadWatch, int], Callable[[object], None]],
    original: Callable[..., Any],
) -> Callable[..., Any]:
    """A module's call that reports when the module is entered and left. Every microsecond in it counts."""

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
        try:
            if lane.on_input is not None:
                lane.on_input(lane, module, args, kwargs)
            output = original(module, *args, **kwargs)
            if lane.on_output is not None:
                lane.on_output(lane, module, output)
            if not depth and task == OUTSIDE:
                for node in nodes_of(output):
                    node.register_prehook(arrival(lane, number_of(node)))
            return output
        finally:
            lane.depth = depth
            emit((Left, lane.number, _number()))

    return call


WATCHING = defined_in(watching)
not_compiled(WATCHING)


def running_node() -> int:
    """Number of the autograd node that runs in this thread."""
    node = _node()
    return OUTSIDE if node is None else number_of(node)
