"""A second process that proves cases beside this one: what is independent takes half the time on two cores.

It is a fresh interpreter and no fork, for autograd does not survive one. It holds two cases at most, so that both
processes end together; a case that it could not finish, whatever stopped it, is proved here. Nothing but verdicts,
events and sizes is sent back. It ends with the socket, so with the process that started it.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from harness.checking.evidence import Verdict
from harness.diagnosing.errors_by_place import error_rows
from harness.ledger import Event
from harness.protocols import CaseLike
from harness.resolve import resolve
from harness.running.interrupts import interrupted_after
from harness.running.proof import CaseResult
from harness.running.summary import SummaryRow, summarize

__all__ = ["Proved", "SecondProcess", "proved", "prove_all", "serve"]

_BOOT = "import sys; sys.path[:] = {path!r}; from harness.running.second_process import serve; serve({descriptor})"
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
_HELD = 2
"""Cases that the second process has at a time: one in work and one to go on with."""
_PROVE = "harness.running.run:prove_case"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """What is stored of a proved case. `ran`: the ranks of `saved_bytes` when they are not all. `errors` are rows of
    errors.csv for a case that failed, `unplaced` says why there are none.
    """

    text: str
    verdicts: tuple[Verdict, ...]
    verdict: str
    machine: bool
    seconds: Mapping[str, float]
    events: tuple[Event, ...]
    rows: tuple[SummaryRow, ...]
    saved_bytes: tuple[int, ...]
    ran: tuple[int, ...]
    errors: tuple[Sequence[object], ...] = ()
    unplaced: str = ""
    traceback: str = ""


def proved(result: CaseResult) -> Proved:
    """The part of a result that is stored."""
    case, evidence = result.case, result.evidence
    ran = tuple(evidence.ran) if evidence else ()
    rows = summarize(result.text, case.mode, case.world_size, result.events, result.expectation, ran)
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
        events=result.events,
        rows=tuple(rows),
        saved_bytes=tuple(evidence.saved_bytes) if evidence else (),
        ran=ran,
        errors=errors,
        unplaced=unplaced,
        traceback=result.traceback,
    )


class SecondProcess:
    """Its end in this process; a context manager. `asked` are the numbers of the cases that it has."""

    def __init__(self, *words: object) -> None:
        """Start it; `words` go before the case to the function that proves there."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(path=sys.path, descriptor=theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is for the first process, which ends this one
                env=dict(os.environ) | _ONE_THREAD,
            )
        self._connection = Connection(ours.detach())
        self._connection.send(words)
        self.asked: deque[int] = deque()
        self.note = ""

    def ask(self, number: int, case: CaseLike) -> None:
        """Have this case proved."""
        self.asked.append(number)
        with suppress(OSError):  # it is gone: `answers` finds out
            self._connection.send(case)

    def answers(self, *, wait: bool) -> dict[int, Proved | None]:
        """What it finished since the last call, None for what it could not; `wait` for one answer at least."""
        found: dict[int, Proved | None] = {}
        try:
            while self.asked and self._connection.poll(None if wait and not found else 0):
                answer = self._connection.recv()
                found[self.asked.popleft()] = answer
        except (EOFError, OSError):
            status = self._process.wait()
            how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            self.note = f"the second process ended ({how}): its cases were proved in the first"
            found |= dict.fromkeys(self.asked)
            self.asked.clear()
        return found

    def close(self) -> None:
        """End it, whatever it is doing."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def prove_all(
    cases: Sequence[CaseLike],
    prove_here: Callable[[int], Proved],
    keep: Callable[[Proved], object],
    second: SecondProcess | None = None,
) -> None:
    """Prove every case, here and in the second process; `keep` gets the results in the order of the cases.

    When something is raised here, what both have finished is kept before it is raised further.
    """
    waiting, finished, kept = deque(range(len(cases))), dict[int, Proved](), 0
    try:
        while kept < len(cases):
            while second and not second.note and len(waiting) > _HELD and len(second.asked) < _HELD:
                number = waiting.popleft()
                second.ask(number, cases[number])
            if waiting:
                number = waiting.popleft()
                finished[number] = prove_here(number)
            for number, answer in (second.answers(wait=not waiting) if second else {}).items():
                if answer is None:
                    waiting.appendleft(number)
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


def serve(descriptor: int) -> None:
    """The second process: prove the cases that come until nobody is there any more."""
    connection = Connection(descriptor)
    prove_case: Any = resolve(_PROVE)
    gc.freeze()  # what is loaded now stays: collections between cases need not look through it
    with suppress(EOFError, OSError):
        words = connection.recv()
        while True:
            case = connection.recv()
            try:
                answer = prove_case(*words, case)
            except Exception:  # raised once more, and told, where the case is proved again
                answer = None
            connection.send(answer)
