"""The scheduler of rank threads: exactly one rank runs, and the turn changes only where a rank waits for a call or asks
about one that is not complete.

A rank that waits gives the turn to the next ready rank and sleeps until it is woken and its turn comes. When no rank is
ready the driver, which is the thread that called `run`, gets the turn. All ranks have finished then, or none can go on.
After a failure the driver gives turns itself, one rank at a time, so that the report shows where every rank got to.

All waits are bounded: the driver waits with a time limit, and whatever happens it wakes every sleeping rank in the end.
The schedule is first come, first served, hence deterministic; only `_next` chooses.
"""

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

from shardproof.harness.engines.starvation import LONGEST, Starvation, own_thread
from shardproof.harness.engines.threads.rank_state import PerRankState
from shardproof.harness.engines.threads.rank_threads import Aborted, RankThread, Stillness, do_nothing, taken_lock
from shardproof.harness.torch_internals.compiler import is_compiler

_GRACE_S = 0.5
"""How long a rank may take to unwind before its thread is abandoned."""
_LISTEN_S = 0.5
"""How often the driver wakes up by itself: a Ctrl-C just before it falls asleep does not wake it."""


class RankStatus(Enum):
    """State of a rank."""

    NOT_STARTED = "not started"
    READY = "ready"
    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"


class RunEnd(Enum):
    """Why the driver got the turn."""

    DONE = "every rank has finished"
    STUCK = "no rank can go on"
    HALTED = "a rank failed"
    TIME = "the time limit was reached"


class Scheduler:
    """Runs `body(rank)` in one thread for each rank. The ranks call `wait`, `wake` and `halt`, the driver the rest.

    A rank may have several threads, one of which acts for it at a time. Another takes over when that one is blocked or
    has ended. `idents` are the identities of the acting threads (threading.get_ident). `guests` maps a rank to the call
    of its thread that waits to take over, in words. `alive` is the engine's.
    """

    def __init__(self, threads: Sequence[RankThread], state: PerRankState, timeout_s: float) -> None:
        world_size = len(threads)
        self.statuses = [RankStatus.NOT_STARTED] * world_size
        self.idents = [0] * world_size
        self.guests: dict[int, str] = {}
        self._own = [0] * world_size
        self._handing_over = threading.Lock()
        self.stopping = False
        self._halted = False
        self._stayed: tuple[int, ...] = ()
        self._state = state
        self._timeout_s = timeout_s
        self.alive: Callable[[], object] = str
        self.starvation = Starvation(own_thread())
        self._ready = deque(range(world_size))
        self._turns = [taken_lock() for _ in range(world_size)]
        self._driver = taken_lock()
        self._body: Callable[[int], None] = do_nothing
        self._threads = tuple(threads)

    # what ranks call, in their turn

    def wait(self, rank: int) -> None:
        """Let others run; return when `wake` was called for this rank and its turn came. Raises Aborted."""
        self._sleep(rank, RankStatus.WAITING)

    def pass_turn(self, rank: int) -> None:
        """Let all others that are ready run before this rank goes on. Raises Aborted."""
        if self._ready:
            self._ready.append(rank)
            self._sleep(rank, RankStatus.READY)

    def _sleep(self, rank: int, status: RankStatus) -> None:
        if self.stopping:
            raise Aborted
        self.statuses[rank] = status
        self._state.leave(rank)
        turn, start_next = self._turns[rank], self._successor()
        start_next()  # the last thing before sleeping: the thread that wakes needs the interpreter
        turn.acquire()
        if self.stopping:
            raise Aborted
        self.statuses[rank] = RankStatus.RUNNING
        self._state.enter(rank)

    def wake(self, rank: int) -> None:
        """Let a rank that waits go on when its turn comes."""
        self.statuses[rank] = RankStatus.READY
        self._ready.append(rank)

    def halt(self) -> None:
        """A rank failed: from the next change of turns on, the driver decides who goes on."""
        self._halted = True

    # what other threads of a rank call

    def take_over(self, rank: int, why: str) -> None:
        """Act for the rank from here on, as soon as the thread that does so is blocked or has ended. Raises Aborted."""
        acting, still = 0, Stillness(0)
        self.guests[rank] = why
        while not self.stopping:
            with self._handing_over:
                if acting != self.idents[rank]:
                    acting, still = self.idents[rank], Stillness(self.idents[rank])
                if acting == threading.get_ident() or (self.statuses[rank] is RankStatus.RUNNING and still()):
                    self.idents[rank] = threading.get_ident()
                    self.guests.pop(rank, None)
                    return
            time.sleep(0.001)
        raise Aborted

    def hand_back(self, rank: int) -> None:
        """A thread that the rank started is done: the rank's own thread acts for it again."""
        with self._handing_over:
            if self.idents[rank] == threading.get_ident():
                self.idents[rank] = self._own[rank]

    # what the driver calls

    def drive(self, body: Callable[[int], None]) -> RunEnd:
        """Start the ranks; return at the run's end, when no rank can go on, at a failure or at the time limit."""
        self._body = body
        seen_s = time.monotonic()
        end_s, latest_s = seen_s + self._timeout_s, seen_s + LONGEST * self._timeout_s
        self.starvation = Starvation(own_thread())
        self._successor()()
        while not self._driver.acquire(timeout=max(0.0, min(_LISTEN_S, end_s - time.monotonic()))):
            lost_s, now_s = self.starvation.look(), time.monotonic()
            lost_s = now_s - seen_s if self._compiles() else lost_s
            if lost_s:
                end_s = min(end_s + lost_s, latest_s)
                self.alive()
            if now_s >= end_s:
                return RunEnd.TIME
            seen_s = now_s
        if self._halted:
            return RunEnd.HALTED
        return RunEnd.DONE if all(status is RankStatus.DONE for status in self.statuses) else RunEnd.STUCK

    def settle(self, budget_s: float) -> None:
        """After a failure: let the ready ranks go on, one by one, until they wait, end, or the budget is spent."""
        self._halted = True
        end_s = time.monotonic() + budget_s
        while self._ready and time.monotonic() < end_s:
            self._turn_of(self._next())()
            if not self._driver.acquire(timeout=max(0.0, end_s - time.monotonic())):
                return

    def _compiles(self) -> bool:
        """Whether a rank compiles now."""
        frames = self.frames()
        while any(frames):
            if any(is_compiler(frame.f_code.co_filename) for frame in frames if frame):
                return True
            # A rank that runs may leave a frame while it is read; its memory may then hold something else.
            frames = [back if isinstance(back := frame.f_back, FrameType) else None for frame in frames if frame]
        return False

    def frames(self) -> list[FrameType | None]:
        """The innermost Python frame of every rank, None for those that have ended."""
        frames = sys._current_frames()
        found = [frames.get(ident) for ident in self.idents]
        frames.clear()  # this thread's own frame is among them: a cycle would keep all variables of the ranks
        return found

    def stop(self) -> tuple[int, ...]:
        """End every rank: sleeping ones are woken to unwind, running ones interrupted. Returns
        those that do not end.
        """
        if not self.stopping:
            self.stopping = True
            order = sorted(range(len(self.statuses)), key=lambda rank: self.statuses[rank] is not RankStatus.RUNNING)
            self._stayed = tuple(rank for rank in order if not self._has_ended(rank))
            # Both refer to the run. A program that leaks its graphs keeps its groups, and these keep this scheduler.
            self._body, self.alive = do_nothing, str
        return self._stayed

    def _has_ended(self, rank: int) -> bool:
        thread, status = self._threads[rank], self.statuses[rank]
        if status is RankStatus.NOT_STARTED:
            return True
        if status is RankStatus.DONE:
            return thread.wait_for_end(_GRACE_S)
        if self._turns[rank].locked():
            self._turns[rank].release()
        if status is not RankStatus.RUNNING and thread.wait_for_end(_GRACE_S / 10):
            return True
        starvation, end_s = Starvation(own_thread()), time.monotonic() + _GRACE_S
        while time.monotonic() < end_s + min(starvation.lost_s, LONGEST * _GRACE_S):
            thread.interrupt()
            if thread.wait_for_end(_GRACE_S / 10):
                return True
            starvation.look()
        return False

    # inside

    def _serve(self, rank: int) -> Callable[[], None]:
        """Serve a rank from its first turn to its end. Returns the function that starts the next turn."""
        with contextlib.suppress(Aborted):
            if not self.stopping:
                torch.autograd.set_multithreading_enabled(False)  # a backward stays on its rank's thread
                self.idents[rank] = self._own[rank] = threading.get_ident()
                self._state.enter(rank)
                self._body(rank)
                if self.idents[rank] != self._own[rank]:
                    self.take_over(rank, "its end")
                self._state.end(rank)
        self.statuses[rank] = RankStatus.DONE
        return self._successor()

    def _successor(self) -> Callable[[], None]:
        """Function that wakes the thread whose turn is next: a ready rank, or the driver."""
        if self.stopping:
            return do_nothing
        if self._halted or not self._ready:
            return self._driver.release
        rank = self._next()
        return self._turns[rank].release if self.statuses[rank] is RankStatus.READY else self._turn_of(rank)

    def _turn_of(self, rank: int) -> Callable[[], None]:
        if self.statuses[rank] is not RankStatus.NOT_STARTED:
            return self._turns[rank].release
        self.statuses[rank] = RankStatus.RUNNING
        return functools.partial(self._threads[rank].begin, f"rank {rank}", functools.partial(self._serve, rank))

    def _next(self) -> int:
        return self._ready.popleft()
