"""The in-process engine with ranks that run at the same time between their calls: for large shapes.

Where a rank's operators are long (hidden 256 and more), torch releases the interpreter in them and ranks fill the
processors; where they are short, ranks only wait for each other, and the other engine is as fast. Groups, calls,
checks of signatures, errors and bits are the same: reductions add in rank order whichever rank comes last.

What the other engine can do because one rank runs at a time, this one cannot:

    random streams   torch's, Python's and numpy's global streams are one for all ranks, so a program that draws from
                     them is not repeatable; give each rank a generator: torch.Generator().manual_seed(seed)
    module globals   are shared by all ranks; `per_rank` is refused
    default dtype    is shared by all ranks
    any-source recv  takes from the rank that sends first by the clock
    interventions    faults and schedules need turns; there are none here

Ranks are threads on all processors, not on one. A rank that deviates ends the run as soon as it is seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from harness.engines.calls.pending import RankGroup
from harness.engines.threads.inproc import InprocEngine
from harness.engines.threads.intervention import Intervention
from harness.engines.threads.matcher import CollectiveMatcher
from harness.engines.threads.rank_threads import Aborted, RankThread
from harness.engines.threads.scheduler import RankStatus, Scheduler
from harness.engines.threads.state.module_state import Namespace
from harness.engines.threads.state.rank_state import CallerStreams, PerRankState
from harness.engines.threads.work import RankCall
from harness.errors import RequestError
from harness.ledger import Observer


class _AtOnce(Intervention):
    """The parts of a run without turns."""

    def state(self, world_size: int, seed: int, places: Sequence[Namespace], caller: CallerStreams) -> PerRankState:
        """Nothing is swapped. Raises RequestError for state of modules that each rank would have for itself."""
        if places:
            raise RequestError(
                "engine=inproc-concurrent: ranks that run at the same time share the state of modules, so there is no "
                "per_rank; legal: --engine inproc, --engine pool"
            )
        return _SharedState(world_size, seed, places, caller)

    def scheduler(self, threads: Sequence[RankThread], state: PerRankState, timeout_s: float) -> Scheduler:
        """All ranks may run."""
        return _FreeScheduler(threads, state, timeout_s)

    def matcher(self, world_size: int, scheduler: Scheduler, observer: Observer | None) -> CollectiveMatcher:
        """One rank at a time inside."""
        assert isinstance(scheduler, _FreeScheduler)
        return _LockedMatcher(world_size, scheduler, observer)


class _SharedState(PerRankState):
    """One state for all ranks; the caller's is restored."""

    def enter(self, rank: int) -> None:
        """Nothing to swap."""

    def leave(self, rank: int) -> None:
        """Nothing to keep."""

    def end(self, rank: int) -> None:
        """Nothing to keep."""


class _FreeScheduler(Scheduler):
    """Starts all ranks at once; counts those that run. `wait` and `wake` are called with `lock` held."""

    def __init__(self, threads: Sequence[RankThread], state: PerRankState, timeout_s: float) -> None:
        super().__init__(threads, state, timeout_s)
        self.lock = threading.Lock()
        self._running = len(self.statuses)
        self._waking = threading.Lock()
        self._ready.clear()

    def wait(self, rank: int) -> None:
        """Sleep until `wake` is called for this rank. Raises Aborted."""
        if self.stopping:
            raise Aborted
        self.statuses[rank] = RankStatus.WAITING
        self._rest()
        self.lock.release()
        self._turns[rank].acquire()
        self.lock.acquire()
        if self.stopping:
            raise Aborted
        self.statuses[rank] = RankStatus.RUNNING

    def wake(self, rank: int) -> None:
        """A rank that waits goes on."""
        if not self.stopping:
            self.statuses[rank] = RankStatus.READY
            self._running += 1
            self._turns[rank].release()

    def take_over(self, rank: int, why: str) -> None:
        """Refused: ranks that run at once have no turn to hand over. Raises RuntimeError."""
        raise RuntimeError(f"{why} on rank {rank}: the engine inproc-concurrent takes calls from the rank's own thread")

    def halt(self) -> None:
        """A rank failed: the driver wakes at once, the others go on until they wait."""
        self._halted = True
        self._wake_driver()

    def settle(self, budget_s: float) -> None:
        """After a failure: let the ranks go on until they wait or end, or the budget is spent."""
        self._driver.acquire(timeout=budget_s)

    def _start(self) -> None:
        for rank in range(len(self.statuses)):
            self._turn_of(rank)()

    def _successor(self) -> Callable[[], None]:
        """A rank has ended."""
        return self._end

    def _end(self) -> None:
        with self.lock:
            self._rest()

    def _rest(self) -> None:
        """One rank less runs; the last one wakes the driver."""
        self._running -= 1
        if self._running == 0:
            self._wake_driver()

    def _wake_driver(self) -> None:
        """Wake the driver, unless it is awake or about to wake."""
        with self._waking:
            if self._driver.locked():
                self._driver.release()


class _LockedMatcher(CollectiveMatcher):
    """A matcher in which one rank at a time is inside; a rank that waits for others leaves it meanwhile."""

    def __init__(self, world_size: int, scheduler: _FreeScheduler, observer: Observer | None) -> None:
        super().__init__(world_size, scheduler, observer)
        self._lock = scheduler.lock

    def group(self, life: int, name: str, ranks: tuple[int, ...], description: str) -> RankGroup:
        """As in the base class."""
        with self._lock:
            return super().group(life, name, ranks, description)

    def agree_on_group(self, rank: int, life: int, number: int, ranks: tuple[int, ...]) -> None:
        """As in the base class."""
        with self._lock:
            super().agree_on_group(rank, life, number, ranks)

    def issue(self, call: RankCall) -> None:
        """As in the base class."""
        with self._lock:
            super().issue(call)

    def post(self, call: RankCall) -> None:
        """As in the base class."""
        with self._lock:
            super().post(call)

    def wait(self, call: RankCall) -> None:
        """As in the base class; other ranks may enter meanwhile."""
        with self._lock:
            super().wait(call)


class ConcurrentEngine(InprocEngine):
    """Runs programs on ranks that are threads, all of them at the same time."""

    name = "inproc-concurrent"
    takes_interventions = False
    _on_one_processor = False
    _parts = _AtOnce()
