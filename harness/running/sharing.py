"""How the cases of a run are shared among this process and others, and what becomes of a case that ends its process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from harness.errors import MachineError, RankDied, ShardproofError
from harness.protocols import CaseLike
from harness.running.processes.interrupts import interrupted_after
from harness.running.proved import Proved
from harness.running.second_process import Answer, ProvingProcess

_HELD, _HELD_AT_LAST = 4, 2
"""Of fewer cases another process is given more: one in work and some to go on with while this one is at a long case.
At last, when as many groups wait, or when this one proves none, it gets no more than one to go on with.
"""
_LISTEN_S = 0.2
"""How often a process is looked at that sends nothing."""
_STARTS = 2
"""Processes in a row that may end before they have begun a case."""


@dataclass(kw_only=True)
class Sharing:
    """The cases of a run and who proves them. `prove_here` is None where other processes prove all of them.

    `keep` gets the results in the order of the cases, and says whether to go on. `ended` makes the result of a case
    that ended its process. `start` starts a process in the place of one that has ended; None where there is no need.
    """

    cases: Sequence[CaseLike]
    keep: Callable[[Proved], bool]
    prove_here: Callable[[int], Proved] | None
    processes: list[ProvingProcess] = field(default_factory=list)
    ended: Callable[[int, ShardproofError], Proved] | None = None
    start: Callable[[], ProvingProcess | None] | None = None
    notes: list[str] = field(default_factory=list)
    _mine: deque[int] = field(default_factory=deque)
    _waiting: deque[deque[int]] = field(default_factory=deque)
    _finished: dict[int, Proved] = field(default_factory=dict)
    _killed: set[int] = field(default_factory=set)
    _idle_ends: int = 0

    def prove_all(self, together: Sequence[Sequence[int]] = ()) -> None:
        """Prove every case, or those until `keep` says that it is enough.

        `together`: the numbers of all cases in groups, each of which one process proves. When something is raised here,
        what all have finished is kept before it is raised further.
        """
        self._waiting = deque(map(deque, together or [[number] for number in range(len(self.cases))]))
        kept = 0
        try:
            while kept < len(self.cases):
                self._give()
                here = bool(self._mine and self.prove_here)
                if self._mine and self.prove_here:
                    number = self._mine.popleft()
                    self._finished[number] = self.prove_here(number)
                self._collect(patient=not here)
                with interrupted_after():
                    while kept in self._finished:
                        kept += 1
                        if not self.keep(self._finished.pop(kept - 1)):
                            return
        except BaseException:
            answers = {number: answer for each in self.processes for number, answer in each.answers().items()}
            self._finished |= {number: answer for number, answer in answers.items() if isinstance(answer, Proved)}
            with interrupted_after():
                for number in sorted(self._finished):
                    self.keep(self._finished[number])
            raise

    def _give(self) -> None:
        """Hand out what waits."""
        if self.prove_here and not self._mine and self._waiting:
            self._mine = self._waiting.popleft()
        for process in self.processes:
            while self._waiting and len(process.asked) < self._held():
                for number in self._waiting.popleft():
                    process.ask(number, self.cases[number])

    def _held(self) -> int:
        """How many cases another process holds while so many groups wait."""
        return _HELD if self.prove_here and len(self._waiting) > _HELD else _HELD_AT_LAST

    def _collect(self, *, patient: bool) -> None:
        """Take what others have finished; `patient`: wait for it a moment."""
        if patient and self.processes:
            wait([process.connection for process in self.processes if process.asked], _LISTEN_S)
        for process in list(self.processes):
            answers = process.answers()
            for number in sorted(answers, key=lambda number: not isinstance(answers[number], Proved)):
                self._take(number, answers[number])
            if process.note:
                self._replace(process)

    def _take(self, number: int, answer: Answer) -> None:
        if isinstance(answer, Proved):
            self._finished[number] = answer
            self._idle_ends = 0
        elif self.prove_here:  # raised once more, and told, where the case is proved again
            self._mine.append(number)
        else:
            raise answer

    def _replace(self, process: ProvingProcess) -> None:
        """A process has ended: tell the case that it was proving, and give the others to someone else."""
        self.processes.remove(process)
        process.close()
        lost = deque(process.asked)
        self._idle_ends += 0 if process.error else 1
        if self.prove_here or (lost and not process.error):
            where = "the first" if self.prove_here else "another one"
            self.notes.append(f"{process.note}: its cases were proved in {where}")
        if process.error and self.ended and not self._once_more(lost[0], process.error):
            number = lost.popleft()
            self._finished[number] = self.ended(number, process.error)
        if lost:
            self._waiting.appendleft(lost)
        if self.prove_here:
            return
        if self.start and self._idle_ends < _STARTS and (new := self.start()):
            self.processes.append(new)
        elif not self.processes:
            raise MachineError(f"{process.note}, and no other one can be started", ranks=(), positions=())

    def _once_more(self, number: int, error: ShardproofError) -> bool:
        """Whether a case is tried once more: killed from outside, mostly because all processes filled the memory."""
        again = isinstance(error, RankDied) and number not in self._killed
        self._killed.add(number)
        return again
