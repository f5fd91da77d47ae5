"""The phase and the module of every call in a trace of the torch profiler, from the rows around it, in order of time.

Phases follow the ledger's rules (harness.recording.lanes). Backward is inside an autograd node, inside torch's function
that runs the nodes, or on autograd's own thread; recompute is in a module or a checkpoint that runs inside a node, step
inside an optimizer's step, forward inside a model. What follows settles the rest. A model is an outermost module that
calls others, since a trace does not name parameters. A loss or metric module without children has no phase of its own.
Times in microseconds.

A phase is "" if a trace cannot show it: whether a message goes between stages, whether an all_gather after a step
gathers parameters, where the updates of a program without optimizers are. Without `with_stack=True` there are no
modules: forward is then what DDP or an annotation encloses, or what lies between two operators whose backward follows.
"""

import heapq
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from shardproof.harness.ledger import AGAIN

NODE, MODULE, STEP, CHECKPOINT, CALL, QUIET, LOUD = ("node", "module", "step", "checkpoint", "call", "quiet", "loud")
WRAPPER, NAMED, FRAME, FORWARD, PROFILED = ("wrapper", "named", "frame", "forward", "profiled")
ENGINE = "engine"
_WORDS: Mapping[str, str] = {
    "forward": "forward",
    "forward pass": "forward",
    "fwd": "forward",
    "backward": "backward",
    "backward pass": "backward",
    "bwd": "backward",
    "loss": "loss",
    "grad sync": "grad_sync",
    "metric": "metric",
    "optimizer": "step",
    "optimizer step": "step",
}
"""The phase that an annotation of the user states for the calls inside of it."""


class TimedRow(NamedTuple):
    """A row of a trace that is used. `call` numbers the calls, -1 for other rows; `elements` are those of its payload
    on this rank, -1 if unknown.
    """

    start_us: float
    end_us: float
    kind: str
    thread: object
    name: str
    call: int = -1
    op: str = ""
    elements: int = -1


class PlaceOfCall(NamedTuple):
    """Where a call is: its phase ("" if unknown), its modules, outer ones first, and the function it is in.

    `annotated`: an annotation of the user states the phase.
    """

    phase: str
    modules: tuple[str, ...]
    caller: str
    annotated: bool = False


def _frame(function: object, name: str) -> str:
    """Name of a Python function in the trace: file from torch's folder, line, name."""
    code = function.__code__  # type: ignore[attr-defined]
    return f"torch/{code.co_filename.rpartition('/torch/')[2]}({code.co_firstlineno}): {name}"


_QUIET = _frame(torch.no_grad.__enter__, "__enter__")
_LOUD = _frame(torch.no_grad.__exit__, "__exit__")
_ENGINE = re.compile(r"torch/autograd/(__init__\.py\(\d+\): (backward|grad)$|graph\.py\(\d+\): _engine_run_backward$)")
"""torch's functions that run a backward: after its last node come callbacks (FSDP2's last reduce_scatter)."""
_OUTSIDE = re.compile(r"<|torch/|.*(/torch/|site-packages/|dist-packages/)|threading\.py|runpy\.py|contextlib\.py")


def kind_of(category: str, name: str) -> str:
    """The kind of a row other than a call, "" for one that shows nothing of phase and place."""
    if category == "cpu_op":
        return NODE if name.startswith("autograd::engine::evaluate_function") else ""
    if category == "user_annotation":
        if name.startswith("Optimizer.step#"):
            return STEP
        return WRAPPER if name == "DistributedDataParallel.forward" else NAMED if _word(name) in _WORDS else ""
    if category != "python_function":
        return ""
    if name.startswith("nn.Module: "):
        return MODULE
    if name.startswith("torch/utils/checkpoint.py("):
        return CHECKPOINT
    if name in (_QUIET, _LOUD):
        return QUIET if name == _QUIET else LOUD
    if _ENGINE.match(name):
        return ENGINE
    return "" if _OUTSIDE.match(name) else FRAME


def _word(name: str) -> str:
    return re.sub(r"[^a-z]+", " ", name.lower()).strip()


_AT_ONCE = 2**16
"""How many rows are made at once."""


class TimedRows:
    """The rows of a trace in columns, since a large one has millions."""

    def __init__(self) -> None:
        self._starts, self._ends = array("d"), array("d")
        self._kinds, self._threads, self._names = array("i"), array("i"), array("i")
        self._values: dict[object, int] = {}
        self._pairs: set[tuple[str, object]] = set()

    def append(self, row: TimedRow) -> None:
        """Add the next row that is no call's."""
        self._starts.append(row.start_us)
        self._ends.append(row.end_us)
        self._kinds.append(self._number(row.kind))
        self._threads.append(self._number((row.thread,)))
        self._names.append(self._number(row.name))
        self._pairs.add((row.kind, row.thread))

    def _number(self, value: object) -> int:
        return self._values.setdefault(value, len(self._values))

    def has(self, kind: str) -> bool:
        """Whether there is a row of this kind."""
        return any(one == kind for one, _ in self._pairs)

    def autograd_threads(self) -> frozenset[object]:
        """Threads with autograd nodes and nothing of a program's own: the engine's for a device.

        Empty if no thread is seen to be the program's: on a CPU backward runs in that one.
        """
        nodes = {thread for kind, thread in self._pairs if kind == NODE}
        others = {thread for kind, thread in self._pairs if kind != NODE}
        return frozenset(nodes - others if others else ())

    def in_order(self, only: str = "") -> Iterator[tuple[int, TimedRow]]:
        """The rows with their places, or those of one kind: by start, outer ones first."""
        values = list(self._values)
        order = np.lexsort((-np.asarray(self._ends), np.asarray(self._starts)))
        if only:
            order = order[np.asarray(self._kinds)[order] == self._values.get(only, -1)]
        for first in range(0, len(order), _AT_ONCE):
            for place in order[first : first + _AT_ONCE].tolist():
                own = (values[column[place]] for column in (self._kinds, self._names, self._threads))
                kind, name, (thread,) = own
                yield place, TimedRow(self._starts[place], self._ends[place], kind, thread, name)

    def calling_modules(self) -> bytearray:
        """For each place, whether its row is a module in which another module starts."""
        found = bytearray(len(self._starts))
        open_: dict[object, list[tuple[float, int]]] = {}
        for place, row in self.in_order(MODULE):
            above = open_.setdefault(row.thread, [])
            while above and above[-1][0] <= row.start_us:
                above.pop()
            if above:
                found[above[-1][1]] = True
            above.append((row.end_us, place))
        return found


def places(rows: TimedRows, calls: Sequence[TimedRow]) -> list[PlaceOfCall]:
    """The places of the calls, which are numbered from 0."""
    calling = rows.calling_modules()
    sweep = _Sweep(len(calls), has_modules=rows.has(MODULE), autograd=rows.autograd_threads())
    of_calls = ((-1, call) for call in sorted(calls, key=_order_of_row))
    for place, row in heapq.merge(rows.in_order(), of_calls, key=lambda pair: _order_of_row(pair[1])):
        sweep.feed(row, place >= 0 and bool(calling[place]))
    return sweep.places()


def _order_of_row(row: TimedRow) -> tuple[float, float, int]:
    return row.start_us, -row.end_us, row.call


@dataclass(slots=True)
class _Open:
    """A row that is in progress in its thread."""

    row: TimedRow
    kind: str
    model: bool = False


@dataclass(slots=True)
class _Sweep:
    """Goes through the rows in order of time; `places()` after all rows were fed."""

    calls: int
    has_modules: bool
    autograd: frozenset[object]
    _found: dict[int, PlaceOfCall] = field(default_factory=dict)
    _pending: list[tuple[int, str]] = field(default_factory=list)
    _threads: dict[object, list[_Open]] = field(default_factory=dict)
    _no_grad: dict[object, int] = field(default_factory=dict)
    _since: str = ""
    _trained: bool = False
    _stepped: bool = False

    def feed(self, row: TimedRow, calls_modules: bool) -> None:
        """Take the next row."""
        self._close(row.start_us)
        above, kind = self._threads.setdefault(row.thread, []), row.kind
        if kind == CALL:
            self._call(row, above)
            return
        if kind in (QUIET, LOUD):
            # A trace that begins inside of a no_grad has only the end of it.
            depth = self._no_grad.get(row.thread, 0) + (1 if kind == QUIET else -1)
            self._no_grad[row.thread] = max(depth, 0)
            return
        if kind == PROFILED:
            return
        if kind == FORWARD:
            if not self.has_modules:
                self._settle("forward")
                self._since = "operator"
            return
        inside = any(open_.kind == NODE for open_ in above)
        outermost = not any(open_.kind in (MODULE, NODE) for open_ in above)
        model = (kind == MODULE and calls_modules or kind == WRAPPER) and outermost
        if model:
            self._settle("data")
            self._trained = not self._no_grad.get(row.thread, 0)
        elif kind == STEP:
            self._stepped = True
            self._settle("grad_sync")
        elif kind == NODE:
            if not self.has_modules:
                self._settle("")  # of the loss, or of another micro-batch
            self._since = "backward"
        if kind != CHECKPOINT or inside:
            above.append(_Open(row, kind, model))

    def places(self) -> list[PlaceOfCall]:
        """The places; calls that wait are settled as at the end of the trace."""
        self._settle("")
        return [self._found[index] for index in range(self.calls)]

    def _close(self, now_us: float) -> None:
        for above in self._threads.values():
            while above and above[-1].row.end_us <= now_us:
                ended = above.pop()
                self._since = "forward" if ended.model else "stepped" if ended.kind == STEP else self._since

    def _call(self, row: TimedRow, above: Sequence[_Open]) -> None:
        modules = tuple(open_.row.name for open_ in above if open_.kind == MODULE)
        caller = next((open_.row.name for open_ in reversed(above) if open_.kind == FRAME), "")
        phase, annotated = self._phase(row, above)
        self._found[row.call] = PlaceOfCall(phase, modules, caller, annotated)

    def _phase(self, row: TimedRow, above: Sequence[_Open]) -> tuple[str, bool]:
        """The phase of a call, "" if it is unknown or pending; and whether an annotation of the user states it."""
        kinds = [open_.kind for open_ in above if open_.kind != FRAME]
        named = [_WORDS[_word(open_.row.name)] for open_ in above if open_.kind == NAMED]
        if row.op in ("send", "recv"):
            self._since = "sent" if not kinds and self._since == "forward" else self._since
            return "", False
        if NODE in kinds:
            return ("backward" if kinds[-1] == NODE else AGAIN), False
        if row.thread in self.autograd or ENGINE in kinds:
            return "backward", False
        if STEP in kinds:
            return "step", False
        if any(open_.model for open_ in above):
            return "forward", False
        if named:
            return named[-1], True
        if self._is_quiet(row.thread, above) and self._trained:
            return "metric", False
        if self._since == "forward" and self.has_modules:
            return "loss", False
        if self._since == "stepped" and self.has_modules:
            if row.op in ("all_reduce", "reduce") and row.elements == 1:
                return "metric", False
            if row.op == "all_gather":
                return "", False
        self._pending.append((row.call, self._since))
        return "", False

    def _is_quiet(self, thread: object, above: Sequence[_Open]) -> bool:
        """Whether the user turned gradients off, in a module that is no model."""
        return self._no_grad.get(thread, 0) > 0 and any(open_.kind == MODULE for open_ in above)

    def _settle(self, by: str) -> None:
        """What follows settles the calls before it; without modules, only if both sides are surely of one phase."""
        last = {"backward": "grad_sync", "stepped": "metric"}
        sure = {("backward", "grad_sync"): "grad_sync", ("operator", "forward"): "forward"}
        for call, since in self._pending:
            if not self.has_modules:
                phase = sure.get((since, by), "")
            else:
                phase = "" if since == "backward" and not self._stepped else by or last.get(since, "data")
            self._found[call] = self._found[call]._replace(phase=phase)
        self._pending.clear()
