"""The agent of a rank, as in torch elastic: the launched process keeps and monitors a worker that runs the programs.

The rank's program runs in a worker of a fork server (forked.fork_server). So a program that hangs can be ended and one
that dies is reported, while the launched process stays. The agent reads the worker's flight recorder and stack, and
passes on its reports without reading them. Messages are pairs:

    from rank 0's engine     START, CALLS, WHERE, LEAVE or KILL, the number of the run; RUN, the order; END, 0
    to it                    the number of the run, Progress

Times are seconds.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from shardproof.harness.engines.processes.exit_status import ProcessEnd
from shardproof.harness.engines.processes.flight_recorder import ReadCalls
from shardproof.harness.engines.processes.forked.fork_server import ForkServer
from shardproof.harness.engines.processes.forked.pool import hash_seed
from shardproof.harness.engines.processes.forked.worker import serve
from shardproof.harness.engines.processes.launched.rendezvous import Launched
from shardproof.harness.engines.processes.messages import RunOrder, Standing, packed
from shardproof.harness.engines.processes.stacks import standings
from shardproof.harness.engines.processes.workers import Worker, receive
from shardproof.harness.errors import MachineError

START, RUN, CALLS, WHERE, LEAVE, KILL, END = "start", "run", "calls", "where", "leave", "kill", "end"
"""START, CALLS and WHERE are answered at once; START makes a worker where there is none. A rank that has ended keeps
its groups until LEAVE, for others may still be reading what it sent."""
_ANSWER_S = 0.5
"""How long a worker may take to print where it stands."""


class Progress(NamedTuple):
    """Progress of a rank: its records since the last answer, and where it stands if that was requested.

    `report`: the packed report of a run that has ended. `end`: how the worker ended.
    """

    calls: ReadCalls = ReadCalls()
    standing: Standing | None = None
    report: bytes = b""
    end: ProcessEnd | None = None


def relayed(link: Connection, place: Launched) -> bool:
    """Serve rank 0's engine with workers of a fork server, which starts at the first; see `relay`."""
    server = ForkServer(hash_seed(place.rank))
    try:
        return relay(link, partial(server.start, serve), place)
    finally:
        server.close()


def relay(link: Connection, fork: Callable[[], Worker], place: Launched) -> bool:
    """Serve rank 0's engine until it ends; True when it sent END, False when it vanished."""
    agent = _Agent(link, fork, place)
    try:
        while True:
            worker = agent.worker
            wait([link] if worker is None else [link, worker.pipe, worker.process.sentinel])
            for _, message in receive({} if worker is None else {worker: 0}, 0.0):
                agent.pass_on(message)
            if link.poll():
                word, content = link.recv()
                if word == END:
                    return True
                agent.carry_out(word, content)
    except (EOFError, OSError):  # rank 0 is gone
        return False
    finally:
        agent.end_worker()
        link.close()


class _Agent:
    """The worker of one rank, if there is one, and the number of its run."""

    def __init__(self, link: Connection, fork: Callable[[], Worker], place: Launched) -> None:
        self._link, self._fork, self._place = link, fork, place
        self._number = 0
        self.worker: Worker | None = None

    def carry_out(self, word: str, content: Any) -> None:
        """Carry out an order of rank 0's engine; where there is no worker, only START."""
        if word == START:
            self._number = content
            try:
                self.worker = self.worker or self._fork()
                self.worker.recording.begin(content)
            except MachineError as problem:
                self._answer(content, Progress(end=ProcessEnd(problem.cause)))
        worker = self.worker
        if worker is None:
            return
        if word == RUN:
            order: RunOrder = content
            place, meeting = self._place, (self._place.master_addr, self._place.master_port)
            order = replace(order, store=meeting, local_rank=place.local_rank)
            worker.send(packed(replace(order, folder=os.getcwd(), path=tuple(sys.path))))
        elif word == LEAVE:
            worker.send(packed(None))
        elif word == KILL:
            self.end_worker()
        elif word == WHERE:
            (standing,) = standings([worker], _ANSWER_S)
            self._answer(content, Progress(standing=standing))
        else:
            self._answer(content, Progress())

    def pass_on(self, message: bytes | ProcessEnd) -> None:
        """Send rank 0 the report of the worker, or how it ended."""
        if isinstance(message, bytes):
            self._answer(self._number, Progress(report=message))
        else:
            self._answer(self._number, Progress(end=message))
            self.end_worker()

    def end_worker(self) -> None:
        """End the worker whatever it does."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def _answer(self, number: int, progress: Progress) -> None:
        """Answer about this run, with the calls recorded since the last answer."""
        if self.worker is not None and number == self._number:
            progress = progress._replace(calls=self.worker.recording.read())
        self._link.send((number, progress))
