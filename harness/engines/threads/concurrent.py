"""The in-process engine with ranks that run at the same time between their calls: for large shapes.

Where a rank's operators are long (hidden 256 and more), torch lets go of the interpreter in them and ranks fill the
processors; where they are short, ranks only wait for each other, and the other engine is as fast. Groups, calls,
checks of what ranks say, errors and bits are the same: reductions add in rank order whoever comes last.

What the other engine can do because one rank runs at a time, this one cannot:

    random streams   torch's, Python's and numpy's global streams are one for all ranks, so a program that draws from
                     them is not repeatable; give each rank a generator: torch.Generator().manual_seed(seed)
    module globals   are shared by all ranks; there is no `per_rank_modules`
    default dtype    is shared by all ranks
    any-source recv  takes from whoever is first, by the clock
    interventions    faults and schedules need turns; there are none here

Ranks are threads on all processors, not on one. A rank that deviates ends the run as soon as it is seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from harness.engines.calls.arithmetic import Combine, Operands
from harness.engines.calls.pending import Group
from harness.engines.calls.signature import Signature
from harness.engines.engine import Program
from harness.engines.threads.inproc import InprocEngine
from harness.engines.threads.intervention import Plain
from harness.engines.threads.matcher import Exchange, Work
from harness.engines.threads.rank_state import Private
from harness.engines.threads.rank_threads import Aborted, Worker
from harness.engines.threads.rng_streams import Caller
from harness.engines.threads.scheduler import Baton, State
from harness.ledger import Observer

__all__ = ["ConcurrentEngine"]


class ConcurrentEngine(InprocEngine):
    """Runs programs on ranks that are threads, all of them at the same time."""

    name = "inproc-concurrent"
    takes_interventions = False
    _on_one_processor = False

    def __init__(self) -> None:
        super().__init__()

    def run(self, program: Program, *args: Any, **words: Any) -> list[Any]:
        """The results of `program(rank, *args)` by rank; see Engine.run."""
        return super().run(program, *args, intervention=_AtOnce(), **words)


class _AtOnce(Plain):
    """The parts of a run without turns."""

    def private(self, world_size: int, seed: int, modules: Sequence[ModuleType], caller: Caller) -> Private:
        """Nothing is swapped."""
        return _Common(world_size, seed, modules, caller)

    def baton(self, workers: Sequence[Worker], private: Private, timeout_s: float) -> Baton:
        """Everybody may run."""
        return _NoTurns(workers, private, timeout_s)

    def exchange(self, world_size: int, baton: Baton, observer: Observer | None) -> Exchange:
        """One rank at a time inside."""
        assert isinstance(baton, _NoTurns)
        return _Locked(world_size, baton, observer)


class _Common(Private):
    """One state for all ranks; the caller's is given back."""

    def enter(self, rank: int) -> None:
        """Nothing to swap."""

    def leave(self, rank: int) -> None:
        """Nothing to keep."""

    def end(self, rank: int) -> None:
        """Nothing to keep."""


class _NoTurns(Baton):
    """Starts all ranks at once; counts those that run. `wait` and `wake` are called with `lock` held."""

    def __init__(self, workers: Sequence[Worker], private: Private, timeout_s: float) -> None:
        super().__init__(workers, private, timeout_s)
        self.lock = threading.Lock()
        self._running = len(self.states)
        self._telling = threading.Lock()
        self._ready.clear()

    def wait(self, rank: int) -> None:
        """Sleep until `wake` is called for this rank. Raises Aborted."""
        if self.stopping:
            raise Aborted
        self.states[rank] = State.WAITING
        self._rest()
        self.lock.release()
        self._turns[rank].acquire()
        self.lock.acquire()
        if self.stopping:
            raise Aborted
        self.states[rank] = State.RUNNING

    def wake(self, rank: int) -> None:
        """A rank that waits goes on."""
        if not self.stopping:
            self.states[rank] = State.READY
            self._running += 1
            self._turns[rank].release()

    def fault(self) -> None:
        """Something went wrong: the driver is told at once, the others go on until they wait."""
        self._halted = True
        self._tell()

    def settle(self, budget_s: float) -> None:
        """After a fault: let the ranks go on until they wait or end, or the budget is spent."""
        self._driver.acquire(timeout=budget_s)

    def _start(self) -> None:
        for rank in range(len(self.states)):
            self._turn_of(rank)()

    def _successor(self) -> Callable[[], None]:
        """A rank has ended."""
        return self._end

    def _end(self) -> None:
        with self.lock:
            self._rest()

    def _rest(self) -> None:
        """One rank less runs; the driver hears when it was the last."""
        self._running -= 1
        if self._running == 0:
            self._tell()

    def _tell(self) -> None:
        """Wake the driver, unless it has been told already and has not looked up yet."""
        with self._telling:
            if self._driver.locked():
                self._driver.release()


class _Locked(Exchange):
    """An exchange in which ranks that run at the same time do not meet each other halfway."""

    def __init__(self, world_size: int, baton: _NoTurns, observer: Observer | None) -> None:
        super().__init__(world_size, baton, observer)
        self._lock = baton.lock

    def group(self, life: int, name: str, ranks: tuple[int, ...], description: str) -> Group:
        """As in any exchange."""
        with self._lock:
            return super().group(life, name, ranks, description)

    def agree_on_group(self, rank: int, life: int, number: int, ranks: tuple[int, ...]) -> None:
        """As in any exchange."""
        with self._lock:
            super().agree_on_group(rank, life, number, ranks)

    def issue(
        self,
        group: Group,
        member: int,
        said: Signature,
        operands: Operands,
        combine: Combine,
        payload: Sequence[Tensor],
        is_async: bool,
    ) -> Work:
        """As in any exchange."""
        with self._lock:
            return super().issue(group, member, said, operands, combine, payload, is_async)

    def post(
        self, group: Group, member: int, said: Signature, peer: int, tag: int, tensor: Tensor, is_async: bool
    ) -> Work:
        """As in any exchange."""
        with self._lock:
            return super().post(group, member, said, peer, tag, tensor, is_async)

    def sleep(self, work: Work) -> None:
        """As in any exchange; the others may enter meanwhile."""
        with self._lock:
            super().sleep(work)
