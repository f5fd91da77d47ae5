"""The supervisor of one run on workers: it follows their reports, deaths and recorded calls, and the clock.

A run ends badly in one of six ways, and the first that explains the others is raised. Ranks issued different calls; a
rank's process ended; a rank raised (an exception that only reports that a peer is gone comes last). No rank can go on
(all that have not finished wait in calls that some rank has not issued). All others have long waited for a rank that
runs, sleeps or is stopped, or the time limit was reached while ranks were at work. Times are seconds; every wait is
bounded.

A rank that does not answer prints where it stands from a signal handler (`locate_workers`). faulthandler needs neither
the interpreter's lock nor memory, so it prints also while native code keeps the lock. Frames are innermost first.
"""

import os
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardproof.harness.engines.calls.callers import is_user
from shardproof.harness.engines.calls.pending import (
    RootCause,
    call_text,
    of_deadlock,
    of_mismatch,
    of_skipped,
    position_in_call,
)
from shardproof.harness.engines.engine import Unwaited
from shardproof.harness.engines.processes import rank_program
from shardproof.harness.engines.processes.flight_recorder import RECORDER_BYTES, ReadCalls, is_waiting
from shardproof.harness.engines.processes.rank_program import RankResult, Standing, WorkerReport
from shardproof.harness.engines.processes.trace_matcher import MatchedCall, TraceMatcher
from shardproof.harness.engines.processes.workers import STACK_SIGNAL, ProcessEnd, StackLine, Worker
from shardproof.harness.errors import (
    Desynchronised,
    MachineError,
    Position,
    RankCrashed,
    RankDied,
    RankRaised,
    RequestError,
    ShardproofError,
    Stalled,
    TimeLimit,
    ranks_text,
)
from shardproof.harness.torch_internals.compiler import is_compiler

_PROGRAM_FILE = rank_program.__file__
"""The file that calls a rank's program. The frames from there on are the engine's."""
_STEP_S = 0.01


def locate_workers(workers: Sequence[Worker], limit_s: float) -> list[Standing]:
    """Where some ranks stand; unknown for those that do not answer in time."""
    pids, files = [worker.pid for worker in workers], [worker.memory for worker in workers]
    for pid, file in zip(pids, files, strict=True):
        os.ftruncate(file, RECORDER_BYTES)
        os.lseek(file, RECORDER_BYTES, os.SEEK_SET)
        _signal(pid, STACK_SIGNAL)
    stopped = [pid for pid in pids if _is_stopped(pid)]
    for pid in stopped:
        _signal(pid, signal.SIGCONT)  # a stopped process prints nothing
    until_s = time.monotonic() + limit_s
    sizes: list[int] = []
    while time.monotonic() < until_s:
        time.sleep(_STEP_S)
        before, sizes = sizes, [os.fstat(file).st_size for file in files]
        if sizes == before and min(sizes, default=0) > RECORDER_BYTES:
            break
    for pid in stopped:
        _signal(pid, signal.SIGSTOP)
    stacks = [worker.stack(f"hread 0x{worker.recording.thread():016x}", _PROGRAM_FILE) for worker in workers]
    return [_stack_as_standing(stack, pid in stopped) for stack, pid in zip(stacks, pids, strict=True)]


def _stack_as_standing(stack: Sequence[StackLine], stopped: bool) -> Standing:
    return Standing(
        bool(stack) and is_waiting(stack[0].file),
        next((str(frame) for frame in stack if is_user(frame.file)), ""),
        tuple(map(str, stack)),
        stopped,
        any(is_compiler(frame.file) for frame in stack),
    )


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process; False if the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False


def _signal(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


_STILL_S = 0.25
"""After this time without a call of any rank it is checked whether any rank can still make one."""
_COMPILES, _COMPILED_S = 10, 5.0
"""How many times its limit a run may last while ranks compile, and after how long that is checked again."""
_PEER_GONE = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused|remote (?:error|process)", re.I)


class Workers(ABC):
    """The workers of one run behind a transport: their recorded `calls`, and the `reports` of those that have ended.

    `died`: how processes ended that are gone, by rank. `look_s` is how long `listen` may wait between two looks at the
    recorded calls. `settle_s` is how long other ranks may go on after the first failure. `one_clock`: whether the times
    of all ranks are comparable.
    """

    look_s: float
    settle_s: float
    one_clock: bool

    def __init__(self, calls: Sequence[Callable[[], ReadCalls]]) -> None:
        self.calls = calls
        self.reports: list[WorkerReport | None] = [None] * len(calls)
        self.died: dict[int, ProcessEnd] = {}

    @property
    def terminated(self) -> str:
        """Why all workers are being ended from outside; "" if they are not."""
        return ""

    def pending_ranks(self) -> list[int]:
        """The ranks that have neither reported nor died."""
        return [rank for rank, report in enumerate(self.reports) if report is None and rank not in self.died]

    @abstractmethod
    def start(self) -> bool:
        """Send every worker its order. Returns False if not all could take it."""

    @abstractmethod
    def listen(self, limit_s: float) -> None:
        """Wait until something comes in, at most `limit_s`, and take it in."""

    def refresh(self) -> None:  # noqa: B027  (not all transports need it)
        """Bring `calls` up to date, if that takes a request to the workers."""

    @abstractmethod
    def locate(self) -> Mapping[int, Standing]:
        """Where the pending ranks stand."""

    @abstractmethod
    def release(self, *, failed: bool) -> None:
        """Let the ranks leave their worlds; after a failure, end those that do not."""


class Supervisor:
    """A run of some workers; `results` waits for its end."""

    def __init__(self, workers: Workers, timeout_s: float, alive: Callable[[], object] = str) -> None:
        self._workers = workers
        self._alive = alive
        self._timeout_s = timeout_s
        self._matcher = TraceMatcher(workers.calls)
        self._ranks = range(len(workers.calls))
        self._standing: Mapping[int, Standing] = {}
        self._quiet = (-1, 0.0)
        self._late: tuple[Sequence[MatchedCall | None], Sequence[int]] | None = None

    def results(self) -> list[Any]:
        """The values by rank. Raises how the run ended otherwise: see Engine.run."""
        workers = self._workers
        if workers.start():
            self._follow(time.monotonic() + self._timeout_s)
        if self._has_failed() or self._matcher.mismatch is not None:
            self._settle()
        error = self._refusal_of_rank() or self._error()
        workers.release(failed=error is not None)
        if error is not None:
            raise error
        return [report.result.value for report in workers.reports if report is not None and report.result is not None]

    def find_unwaited(self) -> tuple[Unwaited, ...]:
        """After a good end: the works that were never waited for, by rank, in the order of issue."""
        return self._matcher.find_unwaited([report.unwaited if report else () for report in self._workers.reports])

    def _follow(self, end_s: float) -> None:
        """Listen until all have ended, one has failed, ranks disagree, none can go on, or the time is over."""
        workers, latest_s = self._workers, end_s + (_COMPILES - 1) * self._timeout_s
        while workers.pending_ranks() and not self._has_failed():
            left_s = end_s - time.monotonic()
            workers.listen(min(workers.look_s, max(left_s, 0.0)))
            self._matcher.read()
            if self._matcher.mismatch is not None:
                return
            if left_s <= 0 and workers.pending_ranks() and not self._has_failed():
                self._late = self._find_waiting_calls(), workers.pending_ranks()
                self._standing = workers.locate()  # a stopped rank may go on for a moment
                if time.monotonic() < latest_s and any(standing.compiles for standing in self._standing.values()):
                    self._late, end_s = None, min(time.monotonic() + _COMPILED_S, latest_s)
                    self._alive()
                    continue
            if left_s <= 0:
                return
            if workers.pending_ranks() and not self._has_failed() and self._is_stuck():
                return

    def _has_failed(self) -> bool:
        """Whether a rank has died, raised, or could not begin, or all are being ended from outside."""
        if self._workers.died or self._workers.terminated:
            return True
        return any(r is not None and (r.result is None or r.result.error is not None) for r in self._workers.reports)

    def _settle(self) -> None:
        """Let the other ranks go on for a moment: the root cause may come second, and they reach their next call."""
        end_s = time.monotonic() + self._workers.settle_s
        while self._workers.pending_ranks() and time.monotonic() < end_s:
            self._workers.listen(end_s - time.monotonic())

    def _is_stuck(self) -> bool:
        """Whether provably no rank can go on. Checked when no rank has issued a call for a while."""
        self._workers.refresh()
        self._matcher.read()
        count, since_s = self._quiet
        if count != self._matcher.count:
            self._quiet = (self._matcher.count, time.monotonic())
            return False
        waiting, pending = self._find_waiting_calls(), self._workers.pending_ranks()
        if time.monotonic() - since_s < _STILL_S or any(waiting[rank] is None for rank in pending):
            return False
        self._standing = self._workers.locate()
        self._matcher.read()
        still = self._find_waiting_calls() == waiting and self._matcher.count == count
        return still and all(self._standing.get(rank, Standing()).in_wait for rank in self._workers.pending_ranks())

    def _find_waiting_calls(self) -> list[MatchedCall | None]:
        """By rank, the call in which it waits and which some rank has not issued; None if it runs or has ended."""
        reports = self._workers.reports
        return [self._matcher.inside(rank) if reports[rank] is None else None for rank in self._ranks]

    def _refusal_of_rank(self) -> ShardproofError | None:
        for report in self._workers.reports:
            if report is not None and report.refused:
                rule = "cannot be read in the process of a rank"
                legal = "legal: what a module defines that ranks can import"
                return RequestError(f"program: {rule}: {report.refused}; {legal}")
            if report is not None and report.broken:
                return MachineError(f"the ranks could not be connected: {report.broken}")
        return None

    def _error(self) -> ShardproofError | None:
        """How the run failed; None if every rank has finished and every call is complete."""
        workers = self._workers
        if self._late is not None:
            return self._of_time(*self._late)
        if workers.pending_ranks():
            self._standing = workers.locate()
        self._matcher.read()
        mismatch, raised, pending = self._matcher.mismatch, self._ranks_that_raised(), self._workers.pending_ranks()
        if mismatch is None and not pending and not self._has_failed():
            skipped = of_skipped(self._matcher.groups)
            return None if skipped is None else self._make_desynchronised(skipped)
        earlier = workers.one_clock and bool(raised) and raised[0].at_s < self._matcher.mismatch_at_s
        if mismatch is not None and not earlier:
            return self._make_desynchronised(of_mismatch(mismatch))
        if died := workers.died:  # one process that ends from outside may cause the ends of others
            kind = RankCrashed if all(end.by_program for end in died.values()) else RankDied
            ends = (f"rank {rank} of {len(self._ranks)} died: {end.words}" for rank, end in sorted(died.items()))
            return kind(", ".join(ends), ranks=sorted(died), positions=self._positions())
        if raised:
            return self._of_raise(raised)
        if workers.terminated:
            return RankDied(workers.terminated, ranks=pending, positions=self._positions())
        return self._of_time(self._find_waiting_calls(), pending)

    def _ranks_that_raised(self) -> list[RankResult]:
        """The ranks that raised, in the order of time; those that only report that a peer is gone come last."""
        found = [r.result for r in self._workers.reports if r is not None and r.result is not None and r.result.error]
        return sorted(found, key=lambda result: (bool(_PEER_GONE.search(result.detail)), result.at_s))

    def _make_desynchronised(self, cause: RootCause) -> Desynchronised:
        return Desynchronised(cause.text, kind=cause.kind, ranks=cause.ranks, positions=self._positions())

    def _of_raise(self, raised: Sequence[RankResult]) -> ShardproofError:
        first = raised[0]
        if isinstance(first.error, RequestError):
            return first.error
        text = f"rank {first.rank} of {len(self._ranks)} raised {first.detail}"
        text += (f", at {first.caller}" if first.caller else "") + first.behind
        error = RankRaised(text, ranks=[result.rank for result in raised], positions=self._positions())
        error.__cause__ = first.error
        return error

    def _of_time(self, waiting: Sequence[MatchedCall | None], pending: Sequence[int]) -> ShardproofError:
        """These ranks have not ended: a deadlock, a rank for which all others wait, or too little time."""
        running = [rank for rank in pending if waiting[rank] is None]
        if not running:
            return self._make_desynchronised(of_deadlock([rank not in pending for rank in self._ranks], waiting))
        text = f"no end within {self._timeout_s:g} s: {', '.join(map(self._describe_running_rank, running))}"
        others, quiet_s = [rank for rank in self._ranks if rank not in running], time.monotonic() - self._quiet[1]
        # A slow machine may need most of the limit before a rank stops; but a stopped rank does not go on by itself.
        stopped = all(self._standing.get(rank, Standing()).stopped for rank in running)
        if not others or (quiet_s < self._timeout_s / 2 and not stopped):
            return TimeLimit(text, ranks=running, positions=self._positions())
        calls = sorted({call_text(call) for call in waiting if call is not None})
        text += f"; for {quiet_s:.1f} s no rank issued a call, and rank {ranks_text(others)} "
        text += f"waits in {', '.join(calls)}" if calls else "has ended"
        return Stalled(text, ranks=running, positions=self._positions())

    def _describe_running_rank(self, rank: int) -> str:
        standing = self._standing.get(rank, Standing())
        words = f"rank {rank} {'is stopped' if standing.stopped else 'runs'}"
        return words + (f" at {standing.caller}" if standing.caller else "")

    def _positions(self) -> list[Position]:
        return [self._position(rank) for rank in self._ranks]

    def _position(self, rank: int) -> Position:
        late = self._late is not None and rank in self._late[1]  # what it did after the limit explains nothing
        report, last = None if late else self._workers.reports[rank], self._matcher.last[rank]
        result, end = (None if report is None else report.result), self._workers.died.get(rank)
        standing = self._standing.get(rank, Standing())
        inside, after = self._matcher.inside(rank), f"last call {call_text(last)}" if last is not None else ""
        if result is not None and result.error is not None:
            lost = inside or (last if last is not None and not last.event.done else None)
            if lost is not None and _PEER_GONE.search(result.detail):
                return position_in_call(lost, "waits in", lost.recorded.caller)
            return Position(rank=rank, state="raised", detail=result.detail, caller=result.caller)
        if (met := self._matcher.at_mismatch.get(rank)) is not None:
            waits = met is last and result is None and end is None
            return position_in_call(met, "waits in" if waits else "passed", met.recorded.caller, standing.stack)
        if result is not None:
            return Position(rank=rank, state="finished")
        if end is not None:
            place = f"in {call_text(inside)}" if inside else after
            detail = "; ".join(part for part in (end.words, place) if part)
            return Position(rank=rank, state="died", detail=detail, caller=last.recorded.caller if last else "")
        if inside is not None:
            return position_in_call(inside, "waits in", inside.recorded.caller, standing.stack)
        state = "is stopped" if standing.stopped else "runs"
        return Position(rank=rank, state=state, detail=after, caller=standing.caller, stack=standing.stack)
