"""A worker's side: the life of the process that is one rank, run after run, each in a world of its own.

Orders come over a pipe, reports go back. A run is reported as soon as the program has ended. Its groups stay until the
rank is released, when all ranks have ended: closing connections earlier would fail ranks that are still reading.

Gloo connections are kept from run to run: making them takes milliseconds and closing them 20, every run and group. A
run still has groups of its own, new to torch and to the program. Only the backend object inside them (connections and
a counter of calls) is the one that the same group of the same processes had before. Ranks that issued the same calls
agree on that counter; after a run that failed its processes are replaced.
"""

import gc
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from shardproof.harness.engines.interposer import Interposer
from shardproof.harness.engines.processes.flight_recorder import FlightRecorder
from shardproof.harness.engines.processes.rank_program import (
    RunOrder,
    WorkerReport,
    pack_report,
    result_of,
    seed_streams,
    unpack_value,
    world,
)
from shardproof.harness.errors import error_text
from shardproof.harness.torch_internals.dispatch import not_deterministic
from shardproof.harness.torch_internals.lookup import replace_attribute
from shardproof.harness.torch_internals.world import Maker, groups_made_by

_Key = tuple[str, int, tuple[int, ...]]


class KeptGroups:
    """The gloo backends of one process by the group's name, size and ranks, for as long as its peers stay the same."""

    def __init__(self, makes: Callable[[str, tuple[int, ...]], None]) -> None:
        """`makes(number, ranks)` is called for every numbered group that is made, with or without this rank."""
        self._makes = makes
        self._connection = -1
        self._backends: dict[_Key, Any] = {}
        self._wanted: _Key = ("", 0, ())
        self._kept = self._make_keeping_class(c10d.ProcessGroupGloo)

    def __len__(self) -> int:
        return len(self._backends)

    @contextmanager
    def use_kept_groups(self, connection: int) -> Iterator[None]:
        """Groups made in the body take the backends kept under this number; those of another number are closed."""
        if connection != self._connection:
            self._backends.clear()
            self._connection = connection

        def make_or_reuse(original: Maker, arguments: inspect.BoundArguments) -> tuple[Any, Any]:
            given = arguments.arguments
            name, ranks = given["group_name"], tuple(given["global_ranks_in_group"])
            self._wanted = (name, given["group_size"], ranks)
            if ranks and name.isdigit():
                self._makes(name, ranks)
            with replace_attribute(c10d, "ProcessGroupGloo", self._kept):
                return original(*arguments.args, **arguments.kwargs)

        with groups_made_by(make_or_reuse):
            yield

    def _make_keeping_class(keeper, gloo: Any) -> Any:  # noqa: N805  (the class below has its own self)
        """A class that replaces ProcessGroupGloo, and makes the object of each group once."""

        class Kept(gloo):
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                return keeper._backends.get(keeper._wanted) or gloo.__new__(cls)

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                if keeper._wanted not in keeper._backends:
                    super().__init__(*args, **kwargs)
                    keeper._backends[keeper._wanted] = self

        return Kept


def processors_of_rank(processors: Iterable[int], rank: int, world_size: int) -> frozenset[int]:
    """The processors of a rank: one of them when they are not more than the ranks, else all."""
    known = sorted(processors)
    return frozenset(known) if len(known) > world_size else frozenset({known[rank % len(known)]})


class CpuAffinity:
    """The processors on which this process runs; it may use those that it started with.

    If there are no more processors than ranks, a rank stays on one of them with all its threads. A call on gloo wakes
    several threads of a rank one after another, and a wake-up on a processor that is awake costs half of one on another
    processor. Ranks share processors in any case. Threads and processes that a rank starts inherit this.
    """

    def __init__(self) -> None:
        self._processors = frozenset(os.sched_getaffinity(0)) if sys.platform == "linux" else frozenset()
        self._now = self._processors

    def take(self, rank: int, world_size: int) -> None:
        """Run as this rank of `world_size`, where the system lets a process choose."""
        if sys.platform != "linux":
            return
        wanted = processors_of_rank(self._processors, rank, world_size)
        if wanted != self._now:
            self._now = wanted
            for thread in os.listdir("/proc/self/task"):
                with suppress(OSError):  # the thread has ended, or a processor was taken from this process meanwhile
                    os.sched_setaffinity(int(thread), wanted)


_FOREVER_S = 86400.0
"""torch's own limit of a wait. The supervisor's comes first: a rank that gave up by itself would hide the cause."""
_STORE_S = 60.0
"""How long the store may take to answer."""
_ABANDONED = 0
"""The exit status if the driver vanishes during a run. Otherwise torch would print at length that the store is gone."""


def serve_orders(pipe: Connection, memory: int) -> None:
    """The life of a worker that is one rank, with this pipe and the file of its flight recorder."""
    gc.enable()  # imports, which make no garbage, ran without collections
    warnings.filterwarnings("ignore", "Work::result API is being deprecated")  # raised by our own FollowedWork
    recorder = FlightRecorder(memory)
    with Interposer(log=recorder) as interposer:
        worker = _Worker(pipe, recorder, interposer)
        while True:
            order: RunOrder | None = unpack_value(pipe.recv_bytes())
            if order is not None:
                worker.run(order)


class _Worker:
    """The pipe, and what stays from run to run: the connection to the store, the kept groups."""

    def __init__(self, pipe: Connection, recorder: FlightRecorder, interposer: Interposer) -> None:
        self._pipe = pipe
        self._recorder = recorder
        self._interposer = interposer
        self._kept = KeptGroups(recorder.makes_group)
        self._affinity = CpuAffinity()
        self._store: Any = None
        self._store_at = ("", 0)

    def run(self, order: RunOrder) -> None:
        """Run the program in a world of its own, report, and leave that world when all ranks may."""
        sys.path[:] = order.path
        os.chdir(order.folder)
        self._recorder.begin(order.number)
        imported, number = len(sys.modules), order.number
        try:
            program, args = unpack_value(order.program)
        except Exception as problem:  # importing a user's module may raise anything
            self._report(WorkerReport(number=number, refused=error_text(problem)))
            return
        if len(sys.modules) != imported:
            self._interposer.add_operators()
        reported = False
        try:
            with self._world(order):
                seed_streams(order.seed)
                result = result_of(program, args, order.rank)
                torch.set_default_dtype(torch.float32)  # switches of torch that a program may have changed
                torch.set_grad_enabled(True)
                not_deterministic()
                reported = True
                self._report(
                    WorkerReport(
                        number=number,
                        result=result,
                        unwaited=self._recorder.waits.find_unwaited(),
                        kept_groups=len(self._kept),
                        reusable=threading.active_count() == 1,
                    )
                )
                del program, args, result
                self._wait_for_release()
        except (RuntimeError, ValueError) as problem:
            if not reported:
                self._report(WorkerReport(number=number, broken=error_text(problem)))

    @contextmanager
    def _world(self, order: RunOrder) -> Iterator[None]:
        """This rank's world, with groups kept from earlier runs if they are the same."""
        if order.store != self._store_at:
            host, port = order.store
            self._store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_STORE_S))
            self._store_at = order.store
        if order.local_rank is None:  # measured: 200 all-reduces of 4 ranks on 2 busy cores take 1.7 s, without it 3.9
            self._affinity.take(order.rank, order.world_size)
        store = PrefixStore(order.store_prefix, self._store)
        own = world(order.rank, order.world_size, store, _FOREVER_S, order.local_rank)
        with self._kept.use_kept_groups(order.connection), own:
            yield

    def _report(self, report: WorkerReport) -> None:
        """Send how the run ended. Ends the process if the driver is gone."""
        try:
            self._pipe.send_bytes(pack_report(report))
        except ConnectionError:
            os._exit(_ABANDONED)

    def _wait_for_release(self) -> None:
        """Return when the driver reports that all ranks have ended."""
        try:
            self._pipe.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(_ABANDONED)
