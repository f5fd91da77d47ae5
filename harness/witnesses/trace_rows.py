"""The rows of a Chrome trace of the torch profiler that stand for phases and collectives, read in time order.

Phases come from the trace alone, by the ledger's rules (harness.recording.lanes). Backward is inside an autograd node,
recompute in a module or a checkpoint that runs inside one, step inside an optimizer's, forward inside a model. The rest
is settled by what follows. A model is an outermost module that calls others, since a trace does not name parameters. A
loss or metric module without children has no phase of its own. Needs `with_stack=True`. Times in microseconds.

Left open, "", is what a trace does not hold: whether a message goes between stages, whether an all_gather after a step
gathers parameters. So is where the updates of a program without optimizers are.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardproof.harness.ledger import AGAIN

NODE, MODULE, STEP, CHECKPOINT, CALL, QUIET, LOUD = ("node", "module", "step", "checkpoint", "call", "quiet", "loud")
Trace = Mapping[str, Any]


def _frame(function: Any, name: str) -> str:
    """Name of a Python function in the trace: file from torch's folder, line, name."""
    path = function.__code__.co_filename
    return f"torch/{path.rpartition('/torch/')[2]}({function.__code__.co_firstlineno}): {name}"


_QUIET = _frame(torch.no_grad.__enter__, "__enter__")
_LOUD = _frame(torch.no_grad.__exit__, "__exit__")


def _kind(row: Trace) -> str:
    name, category = row.get("name", ""), row.get("cat", "")
    if category == "cpu_op":
        if name.startswith("c10d::"):
            return CALL
        return NODE if name.startswith("autograd::engine::evaluate_function") else ""
    if category == "user_annotation":
        return STEP if name.startswith("Optimizer.step#") else ""
    if category != "python_function":
        return ""
    if name.startswith("nn.Module: "):
        return MODULE
    if name.startswith("torch/utils/checkpoint.py("):
        return CHECKPOINT
    return QUIET if name == _QUIET else LOUD if name == _LOUD else ""


@dataclass(slots=True)
class _Open:
    """A row that is going on in its thread."""

    kind: str
    end_us: float
    model: bool = False


def nested(rows: Sequence[Trace]) -> Iterator[tuple[str, Trace, bool]]:
    """(kind, row, it calls other modules) of the rows that matter, by start; outer rows before inner ones."""
    known = [(kind, row) for row in rows if "ts" in row and (kind := _kind(row))]
    known.sort(key=lambda pair: (float(pair[1]["ts"]), -float(pair[1].get("dur", 0.0))))
    calling = _calling([row for kind, row in known if kind == MODULE])
    for kind, row in known:
        yield kind, row, id(row) in calling


def _calling(modules: Sequence[Trace]) -> set[int]:
    """Modules inside of which another module starts, by identity of their rows."""
    found: set[int] = set()
    open_: dict[object, list[Trace]] = {}
    for row in modules:
        above = open_.setdefault(row.get("tid"), [])
        while above and float(above[-1]["ts"]) + float(above[-1]["dur"]) <= float(row["ts"]):
            above.pop()
        if above:
            found.add(id(above[-1]))
        above.append(row)
    return found


@dataclass(slots=True)
class Phases:
    """The phase of every call, in order; `phases()` after all rows were fed."""

    _phases: list[str] = field(default_factory=list)
    _pending: list[tuple[int, str]] = field(default_factory=list)
    _threads: dict[object, list[_Open]] = field(default_factory=dict)
    _no_grad: dict[object, int] = field(default_factory=dict)
    _since: str = ""
    _trained: bool = False
    _stepped: bool = False

    def feed(self, kind: str, row: Trace, calls_modules: bool) -> None:
        """Take the next row."""
        thread, start_us = row.get("tid"), float(row["ts"])
        self._close(start_us)
        above = self._threads.setdefault(thread, [])
        if kind == CALL:
            self._call(thread, above, row)
            return
        if kind in (QUIET, LOUD):
            # A trace that begins inside of a no_grad shows its end alone.
            self._no_grad[thread] = max(self._no_grad.get(thread, 0) + (1 if kind == QUIET else -1), 0)
            return
        inside = any(open_.kind == NODE for open_ in above)
        model = kind == MODULE and calls_modules and not any(o.kind in (MODULE, NODE) for o in above)
        if model:
            self._settle("data")
            self._trained = not self._no_grad.get(thread, 0)
        elif kind == STEP:
            self._stepped = True
            self._settle("grad_sync")
        elif kind == NODE:
            self._since = "backward"
        if kind != CHECKPOINT or inside:
            end_us = start_us + float(row.get("dur", 0.0))
            above.append(_Open(kind, end_us, model))

    def phases(self) -> list[str]:
        """The phases; the end of the trace settles what is open."""
        self._settle("")
        return self._phases

    def _close(self, now_us: float) -> None:
        for above in self._threads.values():
            while above and above[-1].end_us <= now_us:
                ended = above.pop()
                self._since = "forward" if ended.model else "stepped" if ended.kind == STEP else self._since

    def _call(self, thread: object, above: Sequence[_Open], row: Trace) -> None:
        kinds = [open_.kind for open_ in above]
        name = str(row["name"]).removeprefix("c10d::")
        hop, outside = name.startswith(("send", "recv")), not kinds
        if hop:
            phase = ""
            self._since = "sent" if outside and self._since == "forward" else self._since
        elif NODE in kinds:
            phase = "backward" if kinds[-1] == NODE else AGAIN
        elif STEP in kinds:
            phase = "step"
        elif any(open_.model for open_ in above):
            phase = "forward"
        elif self._is_quiet(thread, above) and self._trained:
            phase = "metric"
        elif self._since == "forward":
            phase = "loss"
        elif self._since == "stepped" and name.startswith(("allreduce_", "reduce_")) and _elements(row) == 1:
            phase = "metric"
        elif self._since == "stepped" and "allgather" in name:
            phase = ""
        else:
            phase = ""
            self._pending.append((len(self._phases), self._since))
        self._phases.append(phase)

    def _is_quiet(self, thread: object, above: Sequence[_Open]) -> bool:
        """Gradients are off, as the user said, in a module that is no model."""
        return self._no_grad.get(thread, 0) > 0 and any(open_.kind == MODULE for open_ in above)

    def _settle(self, by: str) -> None:
        last = {"backward": "grad_sync", "stepped": "metric"}
        for index, since in self._pending:
            unknown = since == "backward" and not self._stepped
            self._phases[index] = "" if unknown else by or last.get(since, "data")
        self._pending.clear()


def _elements(row: Trace) -> int:
    """How many elements the tensors of a reduction's first argument have, -1 where the row has no shapes."""
    dims = row.get("args", {}).get("Input Dims") or [None]
    shapes = dims[0]
    if shapes is None:
        return -1
    return math.prod(shapes) if all(isinstance(size, int) for size in shapes) else sum(map(math.prod, shapes))
