"""Watches modules, optimizers and backward from outside and records what every rank's program does.

For as long as it is entered, `nn.Module._call_impl` is wrapped. Global forward hooks cost three times as much a call
and end before a module's own forward hooks run, where DTensor's plans communicate. Wrapping `__call__` itself makes
Python look up the slots of every module class again, half a millisecond a run. Optimizers are seen by torch's global
step hooks. A prehook on the node that made an outermost output reports that backward came; it adds no node and reads
nothing. torch.compile skips the wrapper or traces it to nothing, so compiled code is the same. Not seen: a module whose
`module.compile()` was called before, since its result is called in place of `_call_impl`.

Every rank of a process has its own thread; `on_rank` is entered there. Other threads (autograd's for a device, workers)
count to the rank when it is the only one in the process.
"""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Self

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardproof.harness.recording.enclosing import steps_around
from shardproof.harness.recording.graphs import Graphs, graphs_watched
from shardproof.harness.recording.module_watch import Emit, OfRank, OnInput, OnOutput, ThreadWatch, watching
from shardproof.harness.recording.observations import Arrived, Ended, Finished, Looks, Stepped, Stepping
from shardproof.harness.torch_internals.autograd import called_by, current_task, when_backward_ends

_now_s = time.perf_counter


class Watch:
    """Passes every observation of every rank to `emit(rank)`, a function that takes plain tuples (observations.read).

    `on_output(lane, module, output)`, when given, gets the output of every module call before its Left is emitted, and
    `on_input(lane, module, args, kwargs)` what it is called with after its Entered. With `ends`, the end of every
    backward is observed too.
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
        watched = partial(watching, self._local, self._adopt, self._arrival)
        self._installed.enter_context(called_by(watched))
        self._installed.enter_context(graphs_watched(self._mine))
        self._installed.callback(register_optimizer_step_pre_hook(self._stepping).remove)
        self._installed.callback(register_optimizer_step_post_hook(self._stepped).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._installed.close()

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        """This thread runs the program of a rank until the context is left."""
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
        """The lane of this thread on a rank, made when the thread was not seen before."""
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
        """A lane for a thread that entered no rank: it works for the only rank here; among several, for none."""
        ranks = list(self._open)
        return self.lane(ranks[0]) if len(ranks) == 1 else None

    def _mine(self) -> ThreadWatch | None:
        lane: ThreadWatch | None = getattr(self._local, "lane", None)
        return lane if lane is not None and lane.emit is not None else self._adopt()

    def _arrival(self, made_in: ThreadWatch, number: int) -> Callable[[object], None]:
        """The prehook of the node of an outermost output."""
        rank, lane_number = made_in.rank, made_in.number

        def arrived(_gradients: object) -> None:
            lane = self._mine()
            if lane is None or lane.emit is None or lane.rank != rank:
                return
            task = current_task()
            lane.emit((Arrived, lane.number, task, number, lane_number, _now_s()))
            if self._ends:
                when_backward_ends(lambda: self._ended(task))

        return arrived

    def _ended(self, task: int) -> None:
        lane = self._mine()
        if lane is not None and lane.emit is not None:
            lane.emit((Ended, lane.number, task))

    def _stepping(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        lane = self._mine()
        if lane is not None and lane.emit is not None:
            lane.emit((Stepping, lane.number, current_task(), steps_around(sys._getframe(1)) - 1, _now_s()))

    def _stepped(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        lane = self._mine()
        if lane is not None and lane.emit is not None:
            lane.looks.on = False  # an optimizer ends the steps
            if (captured := lane.graphs.capturing) is not None:
                captured.steps = True
            lane.emit((Stepped, lane.number, captured is not None))
