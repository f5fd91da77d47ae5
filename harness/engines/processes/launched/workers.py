"""The workers of one run in a launched world, as the supervisor sees them: answers over one connection a rank.

An answer begins with the number of its run, so that one that comes late from an earlier run is dropped. Times are
seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait

from harness.engines.processes.exit_status import ProcessEnd, process_end
from harness.engines.processes.flight_recorder import RecordedCall
from harness.engines.processes.launched.agent import DIED, KILL, LEAVE, RUN, START, WHERE
from harness.engines.processes.launched.link import NUMBER_BYTES, Progress
from harness.engines.processes.messages import RunOrder, Standing, WorkerReport, packed, unpacked

_START_S = 60.0
"""How long a child may take to start: it imports torch, at the same time as all others."""
_GRACE_S = 0.5
"""How long ranks may take to end after a failure; then their processes are ended."""
_ANSWER_S = 1.0
"""How long a rank may take to answer where it stands."""
_GONE = ProcessEnd("its launched process is gone")
_TERMINATED = "the launcher ends this world (SIGTERM): one of its processes ended, or the job was stopped"


class SentCalls:
    """A trace_matcher.CallSource: what a remote rank has sent of its flight recorder."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, RecordedCall]] = []
        self._inside = False
        self._waits = 0

    def add(self, progress: Progress) -> None:
        """Take in an answer."""
        self._calls += progress.calls
        self._inside, self._waits = progress.inside, progress.waits

    def new(self) -> Iterator[tuple[float, RecordedCall]]:
        """The calls that came since the last time: when they were recorded, and what."""
        calls, self._calls = self._calls, []
        yield from calls

    def inside(self) -> bool:
        """Whether the call sent last is a synchronous one that is not known to be complete."""
        return self._inside

    def waits(self) -> int:
        """1 + the place, among the asynchronous calls, of the one for which the rank waits; 0 for none."""
        return self._waits


class LaunchedWorkers:
    """A supervisor.Workers: a connection to the agent of every rank. `ending`: whether the launcher ends the world."""

    look_s = 0.3
    settle_s = 0.1
    one_clock = False

    def __init__(self, order: RunOrder, links: Mapping[int, Connection], ending: Callable[[], bool]) -> None:
        self._order = order
        self._number = order.number.to_bytes(NUMBER_BYTES, "big")
        self._links = dict(links)
        self._ending = ending
        self._started = False
        self._standing: dict[int, Standing] = {}
        self.calls = [SentCalls() for _ in links]
        self.reports: list[WorkerReport | None] = [None] * len(links)
        self.died: dict[int, ProcessEnd] = {}

    @property
    def terminated(self) -> str:
        """The launcher's end of the world, if it has come."""
        return _TERMINATED if self._ending() else ""

    def start(self) -> bool:
        """Have a child of every rank, new where there is none, and send it the order; False when one did not start."""
        self._send(START, self._links)
        self._listen_for_answers(_START_S)
        if self.died or self.terminated or set(self._pending()) - self._standing.keys():
            return False
        self._started = True
        for rank in self._links:
            self._put(rank, RUN + packed(replace(self._order, rank=rank)))
        return True

    def listen(self, limit_s: float) -> None:
        """Take in what the pending ranks send first."""
        links = {self._links[rank]: rank for rank in self._pending()}
        for link in wait(list(links), limit_s):
            self._receive(links[link])  # type: ignore[index]

    def refresh(self) -> None:
        """Have the pending ranks send their recorded calls and where they stand."""
        self._standing.clear()
        self._send(WHERE, self._pending())
        self._listen_for_answers(_ANSWER_S)

    def locate(self) -> Mapping[int, Standing]:
        """Where the pending ranks stand now."""
        self.refresh()
        return dict(self._standing)

    def await_ends(self) -> None:
        """Nothing to wait for: a death is reported with its exit status."""

    def release(self, *, failed: bool) -> None:
        """Let the ranks leave their worlds; after a failure, end the children of those that do not within a moment.

        A rank that waits for one that has left gets an error, since the connection is gone.
        """
        self._send(LEAVE, self._links)
        if failed:
            end_s = time.monotonic() + _GRACE_S
            while self._pending() and (left_s := end_s - time.monotonic()) > 0:
                self.listen(left_s)
            self._send(KILL, self._pending())

    def _pending(self) -> list[int]:
        return [rank for rank in self._links if self.reports[rank] is None and rank not in self.died]

    def _listen_for_answers(self, limit_s: float) -> None:
        """Listen until every pending rank has answered where it stands."""
        end_s = time.monotonic() + limit_s
        while set(self._pending()) - self._standing.keys() and (left_s := end_s - time.monotonic()) > 0:
            if self.terminated:
                return
            self.listen(min(left_s, self.look_s))

    def _send(self, kind: bytes, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._put(rank, kind + self._number)

    def _put(self, rank: int, message: bytes) -> None:
        try:
            self._links[rank].send_bytes(message)
        except OSError:
            self.died.setdefault(rank, _GONE)

    def _receive(self, rank: int) -> None:
        try:
            answer = self._links[rank].recv_bytes()
        except (EOFError, OSError):
            self.died[rank] = _GONE
            return
        if answer[:1] == DIED:
            end = process_end(int(answer[1:]))
            self.died[rank] = end._replace(by_program=end.by_program and self._started)
        elif answer[1 : 1 + NUMBER_BYTES] == self._number:
            self._take(rank, unpacked(answer[1 + NUMBER_BYTES :]))

    def _take(self, rank: int, progress: Progress) -> None:
        self.calls[rank].add(progress)
        if not progress.report:
            self._standing[rank] = progress.standing
            return
        report: WorkerReport = unpacked(progress.report)
        if report.result is not None:  # the rank may be on another machine, with another clock
            report = replace(report, result=replace(report.result, at_s=time.monotonic()))
        self.reports[rank] = report
