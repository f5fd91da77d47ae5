"""Other processes that prove cases, beside this one or in its place.

Beside: what is independent takes half the time on two cores. In its place: a case that ends its process (a crash in
native code, memory that runs out), or that hangs in native code, ends neither this process nor other cases; it is told
as what it is, and a new process goes on. Nothing but verdicts, lines of the ledger and sizes is sent back. A process
ends with its socket, so with the one that started it.
"""

from __future__ import annotations

import gc
import itertools
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from harness.engines.processes.exit_status import process_end
from harness.errors import MachineError, RankCrashed, RankDied, RequestError, ShardproofError, TimeLimit
from harness.protocols import CaseLike
from harness.resolve import resolve
from harness.running.processes.forked_process import ForkedProcess
from harness.running.processes.spare_process import Spare
from harness.running.proved import Proved, proved
from harness.running.request import Request
from harness.running.trials.trial import BOUNDED, PARTS, too_long

COLLECTED_AFTER = (5_000, 20, 10)
"""Python looks for garbage after so many new objects (gc.set_threshold): its default of 700 costs a proof 4 %."""
_LEAST_GRACE_S, _MOST_GRACE_S = 3.0, 20.0
"""How much longer than its time limit a part of a case may take before its process is ended: as long again, in these
bounds.
"""
_LEAVE_S = 5.0
"""How long a process that has closed its connection may take to end."""
_PARTS = 10
"""Checks and diagnoses end by themselves; this many time limits without a word are none of theirs."""
_BEGINS = "case"
"""The part of a case before its first run."""
_IN_PROCESS = "inproc", "inproc-concurrent"
_THREADS = "; all ranks are threads of one process: --engine pool tells which rank it was"
_PROVING = "harness.running.run:proving"
Answer: TypeAlias = "Proved | Exception"
"""What is stored of a case, or what was raised."""


class ProvingProcess:
    """This process's end of another one that proves cases. `asked` are the numbers of the cases that it has, the first
    one in work; `note` says how it ended, once it has.
    """

    def __init__(self, process: Spare | ForkedProcess, request: Request, first: Sequence[object] = ()) -> None:
        """Use this one for a request; `first` is what it must be sent before any case."""
        self._process = process
        self._limit_s, self._hint = request.timeout_s, _THREADS if request.engine in _IN_PROCESS else ""
        self._part, self._since_s = "", 0.0
        self.asked: deque[int] = deque()
        self.note = ""
        self.error: ShardproofError | None = None
        with suppress(OSError):  # it is gone: `answers` finds out
            for what in first:
                self.connection.send(what)

    @property
    def connection(self) -> Connection:
        """What has data when there is an answer."""
        return self._process.connection

    def ask(self, number: int, case: CaseLike) -> None:
        """Have this case proved."""
        self.asked.append(number)
        with suppress(OSError):  # it is gone: `answers` finds out
            self.connection.send(case)

    def answers(self) -> dict[int, Answer]:
        """What it finished since the last call. When it has ended, or must be ended, `note` says so and `error` is that
        of the case that it was proving; None when it was proving none.
        """
        found: dict[int, Answer] = {}
        try:
            while self.asked and self.connection.poll():
                answer = self.connection.recv()
                if isinstance(answer, str):
                    self._part, self._since_s = answer, time.monotonic()
                elif not self._part:  # before any case: it has no such subject
                    self.note = f"a process that proves cases ended ({answer})"
                    return found
                else:
                    found[self.asked.popleft()], self._part = answer, ""
        except (EOFError, OSError):
            self._ended()
            return found
        if self.asked and self._part and time.monotonic() > self._since_s + self._allowed_s():
            self._process.kill()
            self._ended(TimeLimit(too_long(self._part, self._limit_s), ranks=(), positions=()))
        return found

    def _allowed_s(self) -> float:
        """How long this part of a case may go on without a word: what ends by itself in time is never ended."""
        grace_s = min(max(self._limit_s, _LEAST_GRACE_S), _MOST_GRACE_S)
        return (1 if self._part in BOUNDED else _PARTS) * self._limit_s + grace_s

    def _ended(self, error: ShardproofError | None = None) -> None:
        code = self._process.wait(_LEAVE_S)
        if code is None:
            self._process.kill()
            code = self._process.wait(_LEAVE_S)
        end = process_end(-signal.SIGKILL if code is None else code)
        self.note = f"a process that proves cases ended ({end.words})"
        if self._part:
            stood = self._process.stood() if isinstance(self._process, ForkedProcess) else ""
            words = f"{end.words}{f', at {stood}' if stood else ''}"
            self.error = error or _error(self._part, words, self._hint, by_program=end.by_program)

    def close(self) -> None:
        """End it, at once when it is at work."""
        if self.asked and isinstance(self._process, ForkedProcess):
            self._process.kill()
        self._process.close()


def _error(part: str, words: str, hint: str, *, by_program: bool) -> ShardproofError:
    """What is told of a case that ended its process in this part."""
    if not by_program:
        return RankDied(words, ranks=(), positions=())
    if part in PARTS:
        return MachineError(f"{PARTS[part]} did not finish: {words}", ranks=(), positions=())
    return RankCrashed(f"{words}{hint}", ranks=(), positions=())


def serve(descriptor: int) -> None:
    """A fresh process beside the first: prove the cases that come until that has ended."""
    connection = Connection(descriptor)
    gc.enable()  # imports, which make no garbage, were done without
    gc.set_threshold(*COLLECTED_AFTER)
    with suppress(EOFError, OSError):
        sys.path[:] = connection.recv()  # modules that the request names are looked for where the first process looks
        try:
            request = connection.recv()
        except RequestError as problem:  # what the first process could import
            connection.send(problem)
            return
        serve_forked(connection, request)


def serve_forked(connection: Connection, request: Request) -> None:
    """Prove the cases of a request that come until the first process has ended."""
    proving: Any = resolve(_PROVING)
    with suppress(EOFError, OSError), proving(request, connection.send) as prove_case:
        for number in itertools.count():
            case = connection.recv()
            connection.send(_BEGINS)
            connection.send(_answer(prove_case, case))
            if not number:
                gc.freeze()  # what is loaded now stays: collections between cases need not look through it


def _answer(prove_case: Callable[[CaseLike], Any], case: CaseLike) -> Answer:
    try:
        return proved(prove_case(case))
    except ShardproofError as problem:
        return problem
    except Exception as problem:
        return RuntimeError(f"{type(problem).__name__}: {problem}\n{traceback.format_exc()}")
