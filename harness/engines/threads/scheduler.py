"""The baton: one thread a rank, exactly one of them running, handed on only where a rank waits.

A rank that waits hands the baton to the next ready rank and sleeps until somebody wakes it and its turn comes. When no
rank is ready the driver, which is the thread that called `run`, gets it: everybody has finished, or nobody can go on.
After a fault the driver hands it out itself, one rank at a time, so that the report knows where every rank got to.

All waits are bounded: the driver waits with a time limit, and whatever happens it wakes every sleeping rank in the end.
The schedule is first come, first served, hence deterministic; `_next` is the one place that chooses.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from types import FrameType

import torch

from harness.engines.threads.rank_state import Private
from harness.engines.threads.rank_threads import Aborted, Worker

__all__ = ["Baton", "End", "State"]

_GRACE_S = 0.5
"""How long a rank may take to unwind before its thread is abandoned."""
_LISTEN_S = 0.5
"""How often the driver looks up: a Ctrl-C that comes just before it falls asleep does not wake it."""


class State(Enum):
    """What a rank is doing."""

    NOT_STARTED = "not started"
    READY = "ready"
    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"


class End(Enum):
    """Why the driver got the baton."""

    DONE = "every rank has finished"
    STUCK = "no rank can go on"
    FAULT = "a rank reported a fault"
    TIME = "the time limit was reached"


class Baton:
    """Runs `body(rank)` in one worker a rank. The ranks call `wait`, `wake` and `fault`, the driver the rest.

    `idents` are the threads' identities as threading.get_ident tells them.
    """

    def __init__(self, workers: Sequence[Worker], private: Private, timeout_s: float) -> None:
        world_size = len(workers)
        self.states = [State.NOT_STARTED] * world_size
        self.idents = [0] * world_size
        self.stopping = False
        self._halted = False
        self._stayed: tuple[int, ...] = ()
        self._private = private
        self._timeout_s = timeout_s
        self._ready = deque(range(world_size))
        self._turns = [_taken() for _ in range(world_size)]
        self._driver = _taken()
        self._body: Callable[[int], None] = _nothing
        self._workers = tuple(workers)

    # what ranks call, holding the baton

    def wait(self, rank: int) -> None:
        """Hand the baton on; return when `wake` was called for this rank and its turn came. Raises Aborted."""
        if self.stopping:
            raise Aborted
        self.states[rank] = State.WAITING
        self._private.leave(rank)
        turn, hand_on = self._turns[rank], self._successor()
        hand_on()  # the last thing before sleeping: whoever wakes needs the interpreter
        turn.acquire()
        if self.stopping:
            raise Aborted
        self.states[rank] = State.RUNNING
        self._private.enter(rank)

    def wake(self, rank: int) -> None:
        """A rank that waits may go on when its turn comes."""
        self.states[rank] = State.READY
        self._ready.append(rank)

    def fault(self) -> None:
        """Something went wrong: from the next hand-off on, the driver leads."""
        self._halted = True

    # what the driver calls

    def drive(self, body: Callable[[int], None]) -> End:
        """Start the ranks; return when the run ends, when nobody can go on, at a fault or at the time limit."""
        self._body = body
        end_s = time.monotonic() + self._timeout_s
        self._start()
        while not self._driver.acquire(timeout=max(0.0, min(_LISTEN_S, end_s - time.monotonic()))):
            if time.monotonic() >= end_s:
                return End.TIME
        if self._halted:
            return End.FAULT
        return End.DONE if all(state is State.DONE for state in self.states) else End.STUCK

    def settle(self, budget_s: float) -> None:
        """After a fault: let the ready ranks go on, one by one, until they wait, end, or the budget is spent."""
        self._halted = True
        end_s = time.monotonic() + budget_s
        while self._ready and time.monotonic() < end_s:
            self._turn_of(self._next())()
            if not self._driver.acquire(timeout=max(0.0, end_s - time.monotonic())):
                return

    def frames(self) -> list[FrameType | None]:
        """The innermost Python frame of every rank, None for those that have ended."""
        frames = sys._current_frames()
        return [frames.get(ident) for ident in self.idents]

    def stop(self) -> tuple[int, ...]:
        """End every rank: sleeping ones are woken to unwind, running ones interrupted. Returns those that went on."""
        if not self.stopping:
            self.stopping = True
            order = sorted(range(len(self.states)), key=lambda rank: self.states[rank] is not State.RUNNING)
            self._stayed = tuple(rank for rank in order if not self._ended(rank))
        return self._stayed

    def _ended(self, rank: int) -> bool:
        worker, state = self._workers[rank], self.states[rank]
        if state is State.NOT_STARTED:
            return True
        if state is State.DONE:
            return worker.ended(_GRACE_S)
        if self._turns[rank].locked():
            self._turns[rank].release()
        if state is not State.RUNNING and worker.ended(_GRACE_S / 10):
            return True
        end_s = time.monotonic() + _GRACE_S
        while time.monotonic() < end_s:
            worker.interrupt()
            if worker.ended(_GRACE_S / 10):
                return True
        return False

    # inside

    def _start(self) -> None:
        """Give the baton to the first rank."""
        self._successor()()

    def _serve(self, rank: int) -> Callable[[], None]:
        """One rank, from its first turn to its end. Returns what hands the baton on."""
        with contextlib.suppress(Aborted):
            if not self.stopping:
                torch.autograd.set_multithreading_enabled(False)  # a backward stays on its rank's thread
                self.idents[rank] = threading.get_ident()
                self._private.enter(rank)
                self._body(rank)
                self._private.end(rank)
        self.states[rank] = State.DONE
        return self._successor()

    def _successor(self) -> Callable[[], None]:
        """What wakes whoever has the baton next: a ready rank, or the driver."""
        if self.stopping:
            return _nothing
        if self._halted or not self._ready:
            return self._driver.release
        return self._turn_of(self._next())

    def _turn_of(self, rank: int) -> Callable[[], None]:
        if self.states[rank] is not State.NOT_STARTED:
            return self._turns[rank].release
        self.states[rank] = State.RUNNING
        return functools.partial(self._workers[rank].begin, f"rank {rank}", functools.partial(self._serve, rank))

    def _next(self) -> int:
        return self._ready.popleft()


def _nothing(*_: object) -> None:
    """Nobody is to be woken; no program is to be run."""


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
