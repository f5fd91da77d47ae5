"""The in-process engine: every rank a thread of this process, one of them running at a time.

Unmodified code that uses torch.distributed runs as it would on W processes: collectives in place, functional,
asynchronous and coalesced, objects, point to point, groups, DeviceMesh, DTensor, FSDP2, DDP. Results and errors do not
depend on the machine's load; a rank that deviates from the others ends the run in milliseconds.

What ranks share because they share the process: the environment (RANK and WORLD_SIZE are not per rank: use
torch.distributed.get_rank), the working folder, CUDA's current device and generators, class attributes, and globals
of modules that `per_rank_modules` does not list. A rank that blocks in native code until another rank acts (a store's
wait, a lock) holds the baton and runs into the time limit. torch.compile was not tried.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch

from harness.engines.engine import Program, Unwaited
from harness.engines.threads import postmortem
from harness.engines.threads.heap import Heap
from harness.engines.threads.intervention import Intervention, Plain
from harness.engines.threads.postmortem import Cause, Raised
from harness.engines.threads.rank_state import Private, modules_named
from harness.engines.threads.rank_threads import Aborted, Worker, Workers
from harness.engines.threads.rank_world import Enter, installed
from harness.engines.threads.rng_streams import Caller
from harness.engines.threads.scheduler import End, State
from harness.engines.threads.unmapped import Unmapped
from harness.errors import (
    Desynchronised,
    NotComputed,
    Position,
    Raced,
    RankRaised,
    RequestError,
    ShardproofError,
    TimeLimit,
    ranks_text,
)
from harness.ledger import Observer
from harness.torch_internals.world import leave_world

__all__ = ["InprocEngine"]

_PLAIN = Plain()
_SETTLE_S = 0.02
"""How long the other ranks may go on after a fault, so that the report shows where they wait."""


class InprocEngine:
    """Runs programs on ranks that are threads. `per_rank_modules` names modules whose globals each rank has to itself.

    During a run torch uses one thread; number of threads, random streams, default dtype, the listed globals and
    torch.distributed are given back after it, also when it fails.
    """

    name = "inproc"
    remote = False
    takes_interventions = True
    _on_one_processor = True

    def __init__(self, *, per_rank_modules: Sequence[str] = ()) -> None:
        self._modules = modules_named(per_rank_modules)
        self._workers = Workers(on_one_processor=self._on_one_processor)
        weakref.finalize(self, self._workers.end)
        self._streams = Caller()
        self._heap = Heap()
        self._unmapped = Unmapped()
        self._closed = False
        self.unwaited: tuple[Unwaited, ...] = ()

    def run(
        self,
        program: Program,
        *args: Any,
        world_size: int,
        observer: Observer | None = None,
        seed: int = 0,
        timeout_s: float = 60.0,
        intervention: Intervention = _PLAIN,
    ) -> list[Any]:
        """The results of `program(rank, *args)` by rank; see Engine.run."""
        self._check(world_size, timeout_s)
        self.unwaited = ()
        threads = torch.get_num_threads()
        with installed() as enter, self._unmapped.recorded():
            private = intervention.private(world_size, seed, self._modules, self._streams)
            workers = self._workers.take(world_size)
            run = _Run(workers, private, observer, timeout_s, intervention)
            try:
                torch.set_num_threads(1)
                results = run.results(program, args, enter)
                self.unwaited = run.exchange.unwaited()
                return results
            finally:
                stayed = run.baton.stop()
                self._workers.give_back([worker for rank, worker in enumerate(workers) if rank not in stayed])
                private.restore()
                torch.set_num_threads(threads)
                self._heap.settle()

    def close(self) -> None:
        """End the idle threads and refuse further runs. All else was given back after each run."""
        self._workers.end()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, world_size: int, timeout_s: float) -> None:
        if self._closed:
            raise RequestError("run: the engine is closed; legal: a new InprocEngine()")
        if world_size < 1:
            raise RequestError(f"world_size {world_size}: must be at least 1; legal: 2")
        if not timeout_s > 0:
            raise RequestError(f"timeout_s {timeout_s}: must be above 0; legal: 60")


class _Run:
    """One run: its baton, its exchange, and how it ends."""

    def __init__(
        self,
        workers: Sequence[Worker],
        private: Private,
        observer: Observer | None,
        timeout_s: float,
        intervention: Intervention,
    ) -> None:
        self.world_size = world_size = len(workers)
        self.timeout_s = timeout_s
        self.baton = intervention.baton(workers, private, timeout_s)
        self.exchange = intervention.exchange(world_size, self.baton, observer)
        self.raised: list[Raised] = []
        self.raised_first = False
        self.values: list[Any] = [None] * world_size

    def results(self, program: Program, args: tuple[Any, ...], enter: Enter) -> list[Any]:
        """Run to the end. Raises RankRaised, Desynchronised or TimeLimit."""

        def body(rank: int) -> None:
            try:
                enter(self.exchange, rank, self.world_size)
                self.values[rank] = program(rank, *args)
            except BaseException as error:
                self._ended(rank, error)
            finally:
                leave_world()

        end = self.baton.drive(body)
        if end is End.FAULT:
            self.baton.settle(_SETTLE_S)
        cause = self._cause(end)
        if cause is None:
            return self.values
        found = postmortem.positions(self.baton, self.exchange, self.raised)
        raise self._error(cause, found) from (self.raised[0].error if self.raised_first else None)

    def _ended(self, rank: int, error: BaseException) -> None:
        """A rank's program ended with an exception."""
        if self.baton.stopping:
            return
        if isinstance(error, SystemExit) and not error.code:
            return
        if isinstance(error, Aborted):
            error = RuntimeError("a call on a process group of an earlier run, which has ended")
        if not self.raised and self.exchange.fault is None:
            self.raised_first = True
        self.raised.append(Raised(rank, error))
        self.baton.fault()

    def _cause(self, end: End) -> Cause | None:
        if self.raised_first:
            return postmortem.of_raise(self.raised, self.world_size)
        if self.exchange.fault is not None:
            return postmortem.of_fault(self.exchange.fault)
        if end is End.TIME:
            return postmortem.of_time(self.baton, self.timeout_s)
        if end is End.STUCK:
            done = [state is State.DONE for state in self.baton.states]
            return postmortem.of_deadlock(done, self.exchange.waiting)
        return postmortem.left_open(list(self.exchange.groups.values()))

    def _error(self, cause: Cause, found: Sequence[Position]) -> ShardproofError:
        """The error to raise, after the threads have ended."""
        abandoned = self.baton.stop()
        text = cause.text
        if abandoned:
            text += f"; rank {ranks_text(abandoned)} is in native code and could not be interrupted: thread abandoned"
        if self.raised_first and isinstance(first := self.raised[0].error, NotComputed):
            return NotComputed(first.cause, ranks=cause.ranks, positions=found)
        if self.raised_first:
            return RankRaised(text, ranks=cause.ranks, positions=found)
        if cause.kind == "race":
            return Raced(text, ranks=cause.ranks, positions=found)
        if cause.kind:
            return Desynchronised(text, kind=cause.kind, ranks=cause.ranks, positions=found)
        return TimeLimit(text, ranks=cause.ranks, positions=found, abandoned=abandoned)
