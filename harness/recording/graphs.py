"""CUDA graphs of a rank: what their capture issued, and that every replay issues it again.

Python runs once, in the capture, which computes nothing. A replay launches the captured kernels without Python, so that
no call is seen in it. The methods of torch.cuda.CUDAGraph are wrapped while the watch is entered. Calls of a capture
are kept by graph, and every replay repeats them as observations of its own. Python that runs inside of a replay, where
a graph is simulated on a CPU, is that of the graph and is not observed. Not seen: graphs that are captured or launched
by other ways than these methods.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from shardproof.harness.recording.observations import OUTSIDE, Graphed, Issued, Stepped, Stepping
from shardproof.harness.torch_internals.lookup import standing


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
        """A capture begins; one of a graph that had another before replaces it."""
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
def graphs_watched(lane: Callable[[], Any]) -> Iterator[None]:
    """While entered, captures and replays are reported to the lane of the thread that makes them: a ThreadWatch."""
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
        mine.replayed(captured)
        return result

    made = {function.__name__: function for function in (capture_begin, capture_end, replay)}
    with ExitStack() as undo:
        for name, original in before.items():
            undo.enter_context(standing(owner, name, functools.wraps(original)(made[name])))
        yield
