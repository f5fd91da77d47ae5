"""Worker processes that prove the cases of a run in place of this one, and how cases are divided among them.

A case may crash its process (in native code, or because memory runs out), or hang in native code. Neither this process
nor the other cases suffer: the case is reported, and a new process proves the rest. A process sends the name of every
part of a case as it begins, then the StoredCase or an exception. It ends when its socket closes, and so with the
process that started it. Times are seconds.

Cases with the same dense model are proved by one process, one after another, so that its results serve all of them. A
case that loads a checkpoint follows the case that saves it.
"""

import gc
import itertools
import pickle
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from shardproof.harness.dense_model import dense_model, in_own_words
from shardproof.harness.engines.processes.workers import ProcessEnd, Worker, receive
from shardproof.harness.errors import MachineError, RankCrashed, RankDied, ShardproofError, TimeLimit
from shardproof.harness.interpreter import interrupted_after
from shardproof.harness.protocols import CaseLike
from shardproof.harness.running.request import Request, folder_of
from shardproof.harness.running.result import StoredCase, stored_part
from shardproof.harness.running.trials.trial import BOUNDED, PARTS, too_long

_LEAST_GRACE_S, _MOST_GRACE_S = 3.0, 20.0
"""How long a part of a case may go on after its time limit before its process is ended: as long as that limit, but no
less than the first of these and no more than the second.
"""
_LEAVE_S = 5.0
"""How long a process may take to end after it has closed its connection."""
_PARTS = 10
"""A part without a limit of its own (checks, a diagnosis) may take this many time limits without a message."""
_BEGINS = "case"
"""The name of the part of a case that comes before its first run."""
_THREADS = "; all ranks are threads of one process: --engine pool tells which rank it was"
_QUEUED = 2
"""A process with fewer cases than this, the one that it proves and the next, gets another group of cases."""
_LISTEN_S = 0.2
"""How often a silent process is checked."""
_STARTS = 2
"""The most processes in a row that may end before they have begun a case."""
Answer: TypeAlias = "StoredCase | Exception"
"""The stored parts of a case, or the exception that it raised."""
Proving = Callable[[Request, Callable[[str], object]], AbstractContextManager[Callable[[CaseLike], Any]]]


class ProvingProcess:
    """A worker that proves cases. `asked` are the numbers of its cases, the current one first.

    After its end `note` says how it ended. `error` is the error of the case that it was then proving; None without one.
    """

    def __init__(self, worker: Worker, request: Request) -> None:
        """Take over this worker, which runs `serve`, for a request."""
        self.worker = worker
        self._limit_s, self._hint = request.timeout_s, _THREADS if request.engine == "inproc" else ""
        self._part, self._since_s = "", 0.0
        self.asked: deque[int] = deque()
        self.note = ""
        self.error: ShardproofError | None = None

    def ask(self, number: int, case: CaseLike) -> None:
        """Have this case proved."""
        self.asked.append(number)
        with suppress(OSError):  # the process has ended, and `take` receives its end
            self.worker.pipe.send(case)

    def take(self, message: bytes | ProcessEnd) -> dict[int, Answer]:
        """Receive a message, or the end of the worker. Returns the case that it has finished, if any."""
        if isinstance(message, ProcessEnd):
            self._end(message)
            return {}
        answer = pickle.loads(message)
        if isinstance(answer, str):
            self._part, self._since_s = answer, time.monotonic()
            return {}
        self._part = ""
        return {self.asked.popleft(): answer}

    def end_if_late(self) -> None:
        """End the worker if it is silent for longer than any part may take."""
        grace_s = min(max(self._limit_s, _LEAST_GRACE_S), _MOST_GRACE_S)
        allowed_s = (1 if self._part in BOUNDED else _PARTS) * self._limit_s + grace_s
        if self._part and not self.note and time.monotonic() > self._since_s + allowed_s:
            late = TimeLimit(too_long(self._part, self._limit_s), ranks=(), positions=())
            self._end(self.worker.kill(), late)

    def _end(self, end: ProcessEnd, error: ShardproofError | None = None) -> None:
        self.note = f"a process that proves cases ended ({end.words})"
        if self._part:
            stood = self.worker.crashed_at()
            words = f"{end.words}{f', at {stood}' if stood else ''}"
            if error is None and not end.by_program:
                error = RankDied(words, ranks=(), positions=())
            elif error is None and self._part in PARTS:
                error = MachineError(f"{PARTS[self._part]} did not finish: {words}", ranks=(), positions=())
            self.error = error or RankCrashed(f"{words}{self._hint}", ranks=(), positions=())

    def close(self) -> None:
        """End the worker, at once if it proves a case."""
        self.worker.close(0.0 if self.asked else _LEAVE_S)


def serve(connection: Connection, request: Request, proving: Proving) -> None:
    """Receive and prove cases of a request until the connection closes."""
    with suppress(EOFError, OSError), proving(request, connection.send) as prove_case:
        for number in itertools.count():
            case = connection.recv()
            connection.send(_BEGINS)
            try:
                answer: Answer = stored_part(prove_case(case))
            except ShardproofError as problem:
                answer = problem
            except Exception as problem:
                answer = RuntimeError(f"{type(problem).__name__}: {problem}\n{traceback.format_exc()}")
            connection.send(answer)
            if not number:
                gc.freeze()  # garbage collections between cases need not search what is loaded now


@dataclass(kw_only=True)
class Sharing:
    """The cases of a run and the processes that prove them.

    `keep` gets the results in the order of the cases, and says whether to go on. `ended` makes the result of a case
    that ended its process. `start` starts a process in place of one that has ended; None if it cannot.
    """

    cases: Sequence[CaseLike]
    processes: list[ProvingProcess]
    keep: Callable[[StoredCase], bool]
    ended: Callable[[int, ShardproofError], StoredCase]
    start: Callable[[], ProvingProcess | None]
    notes: list[str] = field(default_factory=list)
    _waiting: deque[deque[int]] = field(default_factory=deque)
    _finished: dict[int, StoredCase] = field(default_factory=dict)
    _killed: set[int] = field(default_factory=set)
    _idle_ends: int = 0

    def prove_all(self, together: Sequence[Sequence[int]], meanwhile: Callable[[], object]) -> None:
        """Prove every case, or those until `keep` returns False.

        `together`: the numbers of all cases in groups, each for one process. `meanwhile` is called once while the first
        cases are proved. If something raises here, the finished cases are kept before it is raised further.
        """
        self._waiting = deque(map(deque, together))
        kept = 0
        try:
            self._give()
            meanwhile()
            while kept < len(self.cases):
                self._give()
                self._collect()
                with interrupted_after():
                    while kept in self._finished:
                        kept += 1
                        if not self.keep(self._finished.pop(kept - 1)):
                            return
        except BaseException:
            self._receive(0.0)
            with interrupted_after():
                for number in sorted(self._finished):
                    self.keep(self._finished[number])
            raise

    def _give(self) -> None:
        for process in self.processes:
            while self._waiting and len(process.asked) < _QUEUED:
                for number in self._waiting.popleft():
                    process.ask(number, self.cases[number])

    def _collect(self) -> None:
        """Receive what the processes have finished, waiting for a moment."""
        answers = self._receive(_LISTEN_S)
        for process in list(self.processes):
            process.end_if_late()
        for answer in answers:
            if not isinstance(answer, StoredCase):
                raise answer
        self._idle_ends = 0 if answers else self._idle_ends
        for process in [process for process in self.processes if process.note]:
            self._replace(process)

    def _receive(self, limit_s: float) -> list[Answer]:
        """The answers that come within this time. Finished cases are kept."""
        answers: dict[int, Answer] = {}
        while working := {each.worker: each for each in self.processes if each.asked and not each.note}:
            came = list(receive(working, limit_s))
            if not came:
                break
            limit_s = 0.0
            for process, message in came:
                answers |= process.take(message)
        self._finished |= {number: answer for number, answer in answers.items() if isinstance(answer, StoredCase)}
        return [*answers.values()]

    def _replace(self, process: ProvingProcess) -> None:
        """Replace a process that has ended: report the case that it was proving, and give its other cases to another
        one.
        """
        self.processes.remove(process)
        process.close()
        lost = deque(process.asked)
        self._idle_ends += 0 if process.error else 1
        if lost and not process.error:
            self.notes.append(f"{process.note}: its cases were proved in another one")
        if process.error and not self._once_more(lost[0], process.error):
            number = lost.popleft()
            self._finished[number] = self.ended(number, process.error)
        if lost:
            self._waiting.appendleft(lost)
        if self._idle_ends < _STARTS and (new := self.start()):
            self.processes.append(new)
        elif not self.processes:
            raise MachineError(f"{process.note}, and no other one can be started", ranks=(), positions=())

    def _once_more(self, number: int, error: ShardproofError) -> bool:
        """Whether a case is tried once more: its process was killed from outside, mostly because memory ran out."""
        again = isinstance(error, RankDied) and number not in self._killed
        self._killed.add(number)
        return again


def together(cases: Sequence[CaseLike]) -> list[list[int]]:
    """The numbers of the cases, in groups that one process must prove.

    The cases of a group have the same dense model, or one loads what another one saved before.
    """
    groups: dict[CaseLike, list[int]] = {}
    saving: dict[str, CaseLike] = {}
    for number, case in enumerate(cases):
        own: CaseLike = case if in_own_words(case) else dense_model().alike(case)  # plain cases are groups of one
        alike = saving.get(folder_of(case, "load"), own)
        groups.setdefault(alike, []).append(number)
        saving |= {word: alike for word in [folder_of(case, "save")] if word}
    return list(groups.values())


def arrange_cases(cases: Sequence[CaseLike]) -> tuple[CaseLike, ...]:
    """The cases with the most ranks and steps first, those of a group side by side.

    Two processes that take groups in turn then end at nearly the same time.
    """
    work = [case.world_size * case.steps for case in cases]
    groups = sorted(together(cases), key=lambda group: -sum(work[number] for number in group))
    return tuple(cases[number] for group in groups for number in group)
