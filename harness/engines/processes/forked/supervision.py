"""Watches the processes of one run: their answers, their deaths, what they write on their boards, and the clock.

A run ends badly in one of five ways, and the first that explains the others is told: a rank's process ended, ranks said
different things, a rank raised, no rank can go on (all that have not finished are in collectives that somebody did not
issue), or the time limit was reached. Times are seconds.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Sequence
from typing import Any

from harness.engines.engine import Unwaited
from harness.engines.processes.exit_status import Ending, ending, own_doing, vanished
from harness.engines.processes.forked import stacks
from harness.engines.processes.forked.fork_client import ForkServer, RankProcess
from harness.engines.processes.forked.rank_loop import Reply
from harness.engines.processes.forked.stacks import Frame
from harness.engines.processes.messages import unpacked
from harness.engines.processes.rank_program import Ended
from harness.engines.processes.trace_matcher import WAITING_IN, Replay, Written
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

__all__ = ["Supervision"]

_LOOK_S = 0.05
"""How often boards are read while nothing is heard."""
_SETTLE_S = 0.3
"""How long the other ranks may go on after the first sign, so that the report knows the cause and where they stand."""
_BURIAL_S = 2.0
"""How long the fork server may take, on a busy machine, to say how a process ended that has closed its socket."""
_STILL_S = 0.25
"""How long nobody may have issued a call before it is asked whether anybody still can."""
_STACK_S = 0.5


class Supervision:
    """One run of some processes; `results` waits for its end. `replies` by rank are the answers so far."""

    def __init__(self, ranks: Sequence[RankProcess], run: int, timeout_s: float) -> None:
        self._ranks = ranks
        self._run = run
        self._timeout_s = timeout_s
        self._until_s = time.monotonic() + timeout_s
        self._replay = Replay([rank.reader for rank in ranks])
        self._stacks: list[tuple[Frame, ...]] = [()] * len(ranks)
        self._looked = (-1, 0.0)
        self.replies: list[Reply | None] = [None] * len(ranks)
        self._selector = selectors.DefaultSelector()
        for place, rank in enumerate(ranks):
            self._selector.register(rank.mailbox, selectors.EVENT_READ, place)
        for server in {rank.server for rank in ranks}:
            self._selector.register(server.sock, selectors.EVENT_READ, server)

    def results(self) -> list[Any]:
        """The values by rank. Raises what became of the run otherwise."""
        try:
            while None in self.replies and not self._failed():
                left_s = self._until_s - time.monotonic()
                self._listen(min(_LOOK_S, max(left_s, 0.0)))
                self._replay.read()
                if self._replay.fault is not None or left_s <= 0 or self._stuck():
                    break
            if self._failed() or self._replay.fault is not None:
                self._settle()
            self._replay.read()
            return self._judged()
        finally:
            self._selector.close()

    def unwaited(self) -> tuple[Unwaited, ...]:
        """After a good end: the works that nobody waited for, by rank, in the order of issue."""
        return self._replay.unwaited([reply.unwaited if reply else () for reply in self.replies])

    def _listen(self, limit_s: float) -> None:
        for key, _ in self._selector.select(limit_s):
            if isinstance(key.data, ForkServer):
                key.data.listen(_STACK_S)
                continue
            mailbox = self._ranks[key.data].mailbox
            for message in mailbox.arrived():
                reply: Reply = unpacked(message)
                if reply.run == self._run:
                    self.replies[key.data] = reply
            if mailbox.ended:
                self._selector.unregister(mailbox)

    def _failed(self) -> bool:
        """Whether a rank has died, raised, or could not begin."""
        died = any(rank.mailbox.ended for rank in self._ranks)
        return died or any(r is not None and (r.ended is None or r.ended.error is not None) for r in self.replies)

    def _settle(self) -> None:
        until_s = time.monotonic() + _SETTLE_S
        while None in self._ended_or_dead() and time.monotonic() < until_s:
            self._listen(until_s - time.monotonic())
        lost = [rank for rank in self._ranks if rank.mailbox.ended]
        while not all(rank.pid in rank.server.died for rank in lost) and time.monotonic() < until_s + _BURIAL_S:
            self._listen(_LOOK_S)

    def _ended_or_dead(self) -> list[bool | None]:
        return [
            True if reply is not None or rank.mailbox.ended else None
            for reply, rank in zip(self.replies, self._ranks, strict=True)
        ]

    def _ended(self, rank: int) -> Ended | None:
        reply = self.replies[rank]
        return None if reply is None else reply.ended

    def _stuck(self) -> bool:
        """Whether provably no rank can go on: asked when nobody has issued a call for a while."""
        written, since_s = self._looked
        if written != self._replay.written:
            self._looked = (self._replay.written, time.monotonic())
            return False
        waiting = self._waiting()
        if time.monotonic() - since_s < _STILL_S or any(
            reply is None and call is None for reply, call in zip(self.replies, waiting, strict=True)
        ):
            return False
        self._look_at_stacks()
        waits = [bool(stack) and stack[0].file.endswith(WAITING_IN) for stack in self._stacks]
        self._replay.read()
        still = self._waiting() == waiting and self._replay.written == written
        return still and all(reply is not None or wait for reply, wait in zip(self.replies, waits, strict=True))

    def _waiting(self) -> list[Written | None]:
        """By rank, the call in which it waits and which somebody has not issued; None for a rank that has ended."""
        return [self._replay.inside(rank) if reply is None else None for rank, reply in enumerate(self.replies)]

    def _look_at_stacks(self) -> None:
        asked = [place for place, known in enumerate(self._ended_or_dead()) if known is None]
        processes = [(self._ranks[i].pid, self._ranks[i].board, self._ranks[i].reader.thread()) for i in asked]
        for place, stack in zip(asked, stacks.ask(processes, _STACK_S), strict=True):
            self._stacks[place] = stack

    def _judged(self) -> list[Any]:
        """The values, when nothing is wrong."""
        for reply in self.replies:
            if reply is not None and reply.refused:
                rule = "cannot be read in the process of a rank"
                raise RequestError(
                    f"program: {rule}: {reply.refused}; legal: what a module defines that ranks can import"
                )
            if reply is not None and reply.broken:
                raise MachineError(f"the ranks could not be connected: {reply.broken}", ranks=(), positions=())
        error = self._error()
        if error is not None:
            raise error
        values = [reply.ended.value for reply in self.replies if reply is not None and reply.ended is not None]
        left = postmortem.left_open(self._replay.groups)
        if left is not None:
            raise Desynchronised(left.text, kind=left.kind, ranks=left.ranks, positions=self._positions())
        return values

    def _error(self) -> ShardproofError | None:
        dead = [place for place, rank in enumerate(self._ranks) if rank.mailbox.ended]
        raised = sorted((e for i in range(len(self._ranks)) if (e := self._ended(i)) and e.error), key=lambda e: e.at_s)
        fault = self._replay.fault
        if fault is None and not dead and not raised and None not in self.replies:
            return None
        self._look_at_stacks()
        if fault is not None and not (raised and raised[0].at_s < self._replay.fault_at_s):
            return self._desynchronised(postmortem.of_fault(fault))
        if dead:
            endings = {place: self._how(place) for place in dead}
            text = ", ".join(f"rank {place} of {len(self._ranks)} died: {how.words}" for place, how in endings.items())
            kind = RankCrashed if own_doing(endings.values()) else RankDied
            return kind(text, ranks=dead, positions=self._positions())
        if raised:
            return self._of_raise(raised)
        waiting = self._waiting()
        if all(call is not None for reply, call in zip(self.replies, waiting, strict=True) if reply is None):
            return self._desynchronised(postmortem.of_deadlock([reply is not None for reply in self.replies], waiting))
        return self._of_time(waiting)

    def _desynchronised(self, cause: Cause) -> Desynchronised:
        return Desynchronised(cause.text, kind=cause.kind, ranks=cause.ranks, positions=self._positions())

    def _of_raise(self, raised: Sequence[Ended]) -> ShardproofError:
        first = raised[0]
        if isinstance(first.error, RequestError):
            return first.error
        text = f"rank {first.rank} of {len(self._ranks)} raised {first.detail}"
        text += f", at {first.caller}" if first.caller else ""
        error = RankRaised(text, ranks=[ended.rank for ended in raised], positions=self._positions())
        error.__cause__ = first.error
        return error

    def _of_time(self, waiting: Sequence[Written | None]) -> TimeLimit:
        running = [i for i, reply in enumerate(self.replies) if reply is None and waiting[i] is None]
        places = [(rank, stacks.user_line(self._stacks[rank])) for rank in running]
        words = ", ".join(f"rank {rank} runs" + (f" at {place}" if place else "") for rank, place in places)
        text = f"no end within {self._timeout_s:g} s: {words or 'no rank was running'}"
        return TimeLimit(text, ranks=running, positions=self._positions())

    def _positions(self) -> list[Position]:
        return [self._position(rank) for rank in range(len(self._ranks))]

    def _position(self, rank: int) -> Position:
        ended, last, met = self._ended(rank), self._replay.last[rank], self._replay.at_fault.get(rank)
        stack = tuple(map(str, self._stacks[rank]))
        if ended is not None and ended.error is not None:
            return Position(rank=rank, state="raised", detail=ended.detail, caller=ended.caller)
        if met is not None:
            waits = met is last and ended is None and not self._ranks[rank].mailbox.ended
            return postmortem.in_call(met, "waits in" if waits else "passed", met.fact.caller, stack)
        if ended is not None:
            return Position(rank=rank, state="finished")
        inside = self._replay.inside(rank)
        if self._ranks[rank].mailbox.ended:
            words = self._how(rank).words + (f"; in {_words(inside)}" if inside else _after(last))
            return Position(rank=rank, state="died", detail=words, caller=last.fact.caller if last else "")
        if inside is not None:
            return postmortem.in_call(inside, "waits in", inside.fact.caller, stack)
        caller = stacks.user_line(self._stacks[rank])
        return Position(rank=rank, state="runs", detail=_after(last).removeprefix("; "), caller=caller, stack=stack)

    def _how(self, rank: int) -> Ending:
        """How a process ended."""
        status = self._ranks[rank].server.died.get(self._ranks[rank].pid)
        return vanished("its process is gone") if status is None else ending(os.waitstatus_to_exitcode(status))


def _words(call: Written) -> str:
    return f"{call.said.op} #{call.number} of {call.group.label}"


def _after(call: Written | None) -> str:
    return f"; last call {_words(call)}" if call is not None else ""
