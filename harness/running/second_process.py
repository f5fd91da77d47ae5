"""A second process that proves cases beside this one: what is independent takes half the time on two cores.

It holds few cases at a time, so that both processes end together: those that are one case to the dense model, and some
to go on with. A case that it could not finish, whatever stopped it, is proved here. Nothing but verdicts,
lines of the ledger and sizes is sent back. It ends with the socket, so with the process that started it.
"""

from __future__ import annotations

import gc
import itertools
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from harness.checking.evidence import Verdict
from harness.diagnosing.errors_by_place import error_rows
from harness.errors import RequestError
from harness.protocols import CaseLike
from harness.recording.spans import RankSpan
from harness.resolve import resolve
from harness.running.interrupts import interrupted_after
from harness.running.proof import CaseResult
from harness.running.spare_process import Spare
from harness.running.store import ledger_rows
from harness.running.summary import SummaryRow, summarize

__all__ = ["COLLECTED_AFTER", "Proved", "SecondProcess", "proved", "prove_all", "serve"]

COLLECTED_AFTER = (5_000, 20, 10)
"""Python looks for garbage after so many new objects (gc.set_threshold): its default of 700 costs a proof 4 %."""
_HELD, _HELD_AT_LAST = 4, 2
"""Of fewer cases the second process is given more: one in work and some to go on with while this one is at a long case.
At last, when as many groups wait, it gets no more than one to go on with, so that both end together.
"""
_PROVING = "harness.running.run:proving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """What is stored of a proved case. `ledger`: its lines of ledger.csv. `ran`: the ranks of `saved_bytes` when they
    are not all. `errors` are rows of errors.csv for a case that failed, `unplaced` says why there are none.
    """

    text: str
    verdicts: tuple[Verdict, ...]
    verdict: str
    machine: bool
    seconds: Mapping[str, float]
    ledger: str
    rows: tuple[SummaryRow, ...]
    saved_bytes: tuple[int, ...]
    ran: tuple[int, ...]
    errors: tuple[Sequence[object], ...] = ()
    unplaced: str = ""
    traceback: str = ""
    spans: tuple[RankSpan, ...] = ()


def proved(result: CaseResult) -> Proved:
    """The part of a result that is stored."""
    case, evidence = result.case, result.evidence
    ran, axes = (tuple(evidence.ran), evidence.axes) if evidence else ((), case.axes)
    rows = summarize(result.text, case.mode, case.world_size, result.events, result.expectation, ran, axes)
    errors: tuple[Sequence[object], ...] = ()
    unplaced = ""
    if evidence and result.diagnosis:
        try:
            errors = tuple(error_rows(evidence, result.text, result.diagnosis.first))
        except Exception as problem:  # a strange tensor, which the verdicts report; the run goes on
            unplaced = f"{type(problem).__name__}: {problem}"
    return Proved(
        text=result.text,
        verdicts=result.verdicts,
        verdict=result.verdict,
        machine=bool(result.machine),
        seconds=dict(result.seconds),
        ledger=ledger_rows(result.events),
        rows=tuple(rows),
        saved_bytes=tuple(evidence.saved_bytes) if evidence else (),
        ran=ran,
        errors=errors,
        unplaced=unplaced,
        traceback=result.traceback,
        spans=evidence.spans if evidence else (),
    )


class SecondProcess:
    """Its end in this process; a context manager. `asked` are the numbers of the cases that it has."""

    def __init__(self, request: object, spare: Spare | None = None) -> None:
        """Have it prove cases of this request; one is started unless there is a spare one."""
        self._spare = spare or Spare()
        with suppress(OSError):  # it is gone: `answers` finds out
            self._spare.connection.send(sys.path)
            self._spare.connection.send(request)
        self.asked: deque[int] = deque()
        self.note = ""

    def ask(self, number: int, case: CaseLike) -> None:
        """Have this case proved."""
        self.asked.append(number)
        with suppress(OSError):  # it is gone: `answers` finds out
            self._spare.connection.send(case)

    def answers(self, *, wait: bool) -> dict[int, Proved | None]:
        """What it finished since the last call, None for what it could not; `wait` for one answer at least."""
        found: dict[int, Proved | None] = {}
        try:
            while self.asked and self._spare.connection.poll(None if wait and not found else 0):
                answer = self._spare.connection.recv()
                if isinstance(answer, str):
                    self._ended(answer, found)
                    break
                found[self.asked.popleft()] = answer
        except (EOFError, OSError):
            status = self._spare.process.wait()
            how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            self._ended(how, found)
        return found

    def _ended(self, how: str, found: dict[int, Proved | None]) -> None:
        self.note = f"the second process ended ({how}): its cases were proved in the first"
        found |= dict.fromkeys(self.asked)
        self.asked.clear()

    def close(self) -> None:
        """End it, whatever it is doing."""
        self._spare.close()


def prove_all(
    cases: Sequence[CaseLike],
    prove_here: Callable[[int], Proved],
    keep: Callable[[Proved], object],
    second: SecondProcess | None = None,
    together: Sequence[Sequence[int]] = (),
) -> None:
    """Prove every case, here and in the second process; `keep` gets the results in the order of the cases.

    `together`: the numbers of all cases in groups, each of which one process proves. When something is raised here,
    what both have finished is kept before it is raised further.
    """
    waiting = deque(map(deque, together or [[number] for number in range(len(cases))]))
    mine, finished, kept = deque[int](), dict[int, Proved](), 0
    try:
        while kept < len(cases):
            if not mine and waiting:
                mine = waiting.popleft()
            while second and not second.note and waiting and len(second.asked) < _held(len(waiting)):
                for number in waiting.popleft():
                    second.ask(number, cases[number])
            if mine:
                number = mine.popleft()
                finished[number] = prove_here(number)
            for number, answer in (second.answers(wait=not mine and not waiting) if second else {}).items():
                if answer is None:
                    mine.append(number)
                else:
                    finished[number] = answer
            with interrupted_after():
                while kept in finished:
                    keep(finished.pop(kept))
                    kept += 1
    except BaseException:
        answers = second.answers(wait=False) if second else {}
        finished |= {number: answer for number, answer in answers.items() if answer}
        with interrupted_after():
            for number in sorted(finished):
                keep(finished[number])
        raise


def _held(waiting: int) -> int:
    """How many cases the second process holds while so many groups wait."""
    return _HELD if waiting > _HELD else _HELD_AT_LAST


def serve(descriptor: int) -> None:
    """The second process: prove the cases that come until the first process has ended."""
    connection = Connection(descriptor)
    proving: Any = resolve(_PROVING)
    gc.enable()  # imports, which make no garbage, were done without
    gc.set_threshold(*COLLECTED_AFTER)
    try:
        request = _received(connection)
    except RequestError as problem:  # what the first process could import
        connection.send(str(problem))
        return
    with suppress(EOFError, OSError), proving(request) as prove_case:
        for number in itertools.count():
            case = connection.recv()
            try:
                answer = proved(prove_case(case))
            except Exception:  # raised once more, and told, where the case is proved again
                answer = None
            connection.send(answer)
            if not number:
                gc.freeze()  # what is loaded now stays: collections between cases need not look through it


def _received(connection: Connection) -> Any:
    """The request; modules that it names are looked for where the first process looks. Raises RequestError."""
    sys.path[:] = connection.recv()
    return connection.recv()
