"""What stands in place of a module's call while a watch is entered: it reports when the module is entered and left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.recording.observations import OUTSIDE, Entered, Left
from harness.torch_internals.autograd import (
    current_node,
    current_task,
    defined_in,
    next_number,
    nodes_of,
    not_compiled,
    number_of,
)

if TYPE_CHECKING:
    from harness.recording.watch import ThreadWatch

_task, _node, _number = current_task, current_node, next_number
_grad = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling
_now_s = time.perf_counter


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
