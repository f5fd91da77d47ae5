"""One run on ranks that answer over connections: order, listen, compare what they issue, and judge how it ended.

The first that explains the others is told: ranks that say different things, a process that died, an exception of the
program before one that only says that a peer is gone, ranks of which none can go on, the time limit. A rank that does
not end soon after that has its child process ended. Times are seconds.
"""

from __future__ import annotations

import time

from harness.engines.engine import Unwaited
from harness.engines.processes.exit_status import own_doing
from harness.engines.processes.launched.agent import KILL, LEAVE, RUN, START, WHERE
from harness.engines.processes.launched.answers import Answers
from harness.engines.processes.launched.rank_child import Order
from harness.engines.processes.trace_matcher import Replay, Written
from harness.engines.threads import postmortem
from harness.engines.threads.postmortem import Cause
from harness.errors import (
    Desynchronised,
    MachineError,
    Position,
    RankCrashed,
    RankDied,
    RankRaised,
    RequestError,
    ShardproofError,
    TimeLimit,
)

__all__ = ["RemoteRun"]

_START_S = 60.0
"""How long a child may take to start: it imports torch, beside all others."""
_LOOK_S = 0.3
"""How often ranks are asked where they stand while nothing is heard; twice the same waits mean that they are stuck."""
_SETTLE_S = 0.1
"""How long the others may go on after one has failed, until they are asked where they stand."""
_GRACE_S = 0.5
"""How long they may take to end after that; then their processes are ended."""
_ASK_S = 1.0
"""How long a rank that is stuck may take to say where."""


class RemoteRun:
    """One run of an order; `results` waits for its end."""

    def __init__(self, answers: Answers, order: Order) -> None:
        self._answers = answers
        self._order = order
        self._replay = Replay(answers.boards)
        self._written = -1
        self._stuck = False
        self._ordered = False

    def results(self) -> list[object]:
        """The values by rank. Raises what became of the run otherwise; ranks that did not end have been by then."""
        answers = self._answers
        answers.order(START, answers.ranks)
        answers.listen(time.monotonic() + _START_S, answers.asked)
        if answers.asked() and not answers.failed:
            self._ordered = True
            answers.order(RUN, answers.ranks, self._order)
            self._follow(time.monotonic() + self._order.timeout_s)
        self._replay.read()
        if answers.failed:
            answers.listen(time.monotonic() + _SETTLE_S, lambda: False)  # the root cause may be told second
        if answers.pending:
            self._look()
        self._replay.read()
        error = self._error()
        answers.order(LEAVE, answers.ranks)  # those who wait for a rank that has left learn that its end is gone
        if error is None:
            return [ended.value for ended in answers.ended.values()]
        answers.listen(time.monotonic() + _GRACE_S, lambda: False)
        answers.order(KILL, answers.pending)
        raise error

    def unwaited(self) -> tuple[Unwaited, ...]:
        """After a good end: the works that nobody waited for, by rank, in the order of issue."""
        return self._replay.unwaited(self._answers.unwaited)

    def _follow(self, end_s: float) -> None:
        """Listen until all have ended, one has failed, ranks disagree, none can go on, or the time has come."""
        answers = self._answers
        while answers.pending and not answers.failed and not self._stuck:
            answers.listen(min(end_s, time.monotonic() + _LOOK_S), lambda: answers.failed)
            self._replay.read()
            if self._replay.fault is not None or time.monotonic() >= end_s:
                return
            if answers.pending and not answers.failed:
                self._look()

    def _look(self) -> None:
        """Ask those who have not ended where they stand; `_stuck` when none of them can go on."""
        answers = self._answers
        answers.ask(WHERE, _ASK_S)
        self._replay.read()
        still = self._replay.written == self._written
        self._written = self._replay.written
        waits = [self._waiting(rank) is not None and answers.waits(rank) for rank in answers.pending]
        self._stuck = still and bool(waits) and all(waits)

    def _waiting(self, rank: int) -> Written | None:
        """The call in which a rank waits and which somebody has not issued; None for a rank that has ended."""
        return self._replay.inside(rank) if rank in self._answers.pending else None

    def _error(self) -> ShardproofError | None:
        answers, found = self._answers, self._positions
        if answers.refused:
            rule = "cannot be used by the process of a rank"
            return RequestError(
                f"program: {rule}: {answers.refused}; legal: what a module defines that ranks can import"
            )
        if answers.broken:
            return MachineError(f"the ranks could not be connected: {answers.broken}", ranks=(), positions=())
        if self._replay.fault is not None:
            return self._desynchronised(postmortem.of_fault(self._replay.fault))
        if answers.died:
            text = ", ".join(
                f"rank {rank} of {self._order.world_size} died: {how.words}" for rank, how in answers.died.items()
            )
            own = self._ordered and own_doing(answers.died.values())
            return (RankCrashed if own else RankDied)(text, ranks=tuple(answers.died), positions=found())
        if raised := answers.raised:
            first = raised[0]
            if isinstance(first.error, RequestError):
                return first.error
            text = f"rank {first.rank} of {self._order.world_size} raised {first.detail}"
            text += f", at {first.caller}" if first.caller else ""
            error = RankRaised(text, ranks=[ended.rank for ended in raised], positions=found())
            error.__cause__ = first.error
            return error
        if answers.failed:
            text = "the launcher ends this world (SIGTERM): one of its processes ended, or the job was stopped"
            return RankDied(text, ranks=answers.pending, positions=found())
        if self._stuck:
            done = [rank not in answers.pending for rank in answers.ranks]
            return self._desynchronised(postmortem.of_deadlock(done, [self._waiting(rank) for rank in answers.ranks]))
        if answers.pending:
            return self._of_time()
        left = postmortem.left_open(self._replay.groups)
        return None if left is None else self._desynchronised(left)

    def _desynchronised(self, cause: Cause) -> Desynchronised:
        return Desynchronised(cause.text, kind=cause.kind, ranks=cause.ranks, positions=self._positions())

    def _of_time(self) -> TimeLimit:
        found = self._positions()
        running = [rank for rank in self._answers.pending if self._waiting(rank) is None]
        words = ", ".join(
            f"rank {rank} runs" + f" at {found[rank].caller}" * bool(found[rank].caller) for rank in running
        )
        text = f"no end within {self._order.timeout_s:g} s: {words or 'no rank was running'}"
        return TimeLimit(text, ranks=running, positions=found)

    def _positions(self) -> list[Position]:
        return [self._position(rank) for rank in self._answers.ranks]

    def _position(self, rank: int) -> Position:
        answers, last, met = self._answers, self._replay.last[rank], self._replay.at_fault.get(rank)
        ended, after = answers.ended.get(rank), f"last call {_words(last)}" if last is not None else ""
        if ended is not None and ended.error is not None:
            return Position(rank=rank, state="raised", detail=ended.detail, caller=ended.caller)
        if met is not None:
            waits = met is last and rank in answers.pending
            return postmortem.in_call(met, "waits in" if waits else "passed", met.fact.caller)
        if ended is not None:
            return Position(rank=rank, state="finished")
        if rank in answers.died:
            detail = "; ".join(part for part in (answers.died[rank].words, after) if part)
            return Position(rank=rank, state="died", detail=detail)
        inside = self._replay.inside(rank)
        if inside is not None:
            return postmortem.in_call(inside, "waits in", inside.fact.caller)
        return Position(rank=rank, state="runs", detail=after, caller=answers.caller(rank))


def _words(call: Written) -> str:
    return f"{call.said.op} #{call.number} of {call.group.label}"
