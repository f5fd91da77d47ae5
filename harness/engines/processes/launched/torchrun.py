"""The torchrun engine: ranks are the processes that torchrun or SLURM launched, on one machine or many.

    torchrun --nnodes 2 --nproc-per-node 4 ... -m shardproof run "mode=tp tp=8 kv_heads=8" --engine torchrun

Rank 0's process drives: it alone draws cases, checks and prints. All others call `serve_driver` and end when it does.
Orders and results travel on connections of their own (launched.rendezvous), never on the groups under test. torchrun
turns every exit status but 0 into 1. A case that is smaller than the world runs on its first ranks.

As in torch elastic, a launched process is the agent of its rank. The rank's program runs in a worker of a fork server,
with a fresh default group in every run. So a program that hangs can be ended, one that dies is reported, and what it
breaks does not reach the next run. The agent reads the worker's flight recorder and stack, and passes on its reports
without reading them. Messages are pairs:

    from rank 0's engine     (START, CALLS, WHERE, LEAVE or KILL; the number of the run), (RUN; the order), (END; 0)
    to it                    (the number of the run; Progress)

Times are seconds.
"""

import functools
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from shardproof.harness.engines.engine import Engine, RunRequest
from shardproof.harness.engines.processes.flight_recorder import ReadCalls
from shardproof.harness.engines.processes.forked.pool import ForkServer, hash_seed
from shardproof.harness.engines.processes.forked.worker import serve_orders
from shardproof.harness.engines.processes.launched.rendezvous import (
    Launched,
    gather_connections,
    join_driver,
    launched_world,
)
from shardproof.harness.engines.processes.rank_program import (
    RunOrder,
    Standing,
    WorkerReport,
    pack_program,
    pack_value,
    unpack_value,
)
from shardproof.harness.engines.processes.supervisor import Supervisor, Workers, locate_workers
from shardproof.harness.engines.processes.workers import ProcessEnd, Worker, receive
from shardproof.harness.errors import MachineError, RequestError
from shardproof.harness.ledger import Observer

START, RUN, CALLS, WHERE, LEAVE, KILL, END = "start", "run", "calls", "where", "leave", "kill", "end"
"""START, CALLS and WHERE are answered at once; START makes a worker if there is none. A rank that has ended keeps its
groups until LEAVE, since others may still read what it sent.
"""
_STACK_S = 0.5
"""How long a worker may take to print where it stands."""


class Progress(NamedTuple):
    """Progress of a rank: its records since the last answer, and where it stands if that was requested.

    `report`: the packed report of a run that has ended. `end`: how the worker ended.
    """

    calls: ReadCalls = ReadCalls()
    standing: Standing | None = None
    report: bytes = b""
    end: ProcessEnd | None = None


def serve_by_workers(link: Connection, place: Launched) -> bool:
    """Serve rank 0's engine with workers of a fork server, which starts with the first worker; see `relay_orders`."""
    server = ForkServer(hash_seed(place.rank))
    try:
        return relay_orders(link, partial(server.start, serve_orders), place)
    finally:
        server.close()


def relay_orders(link: Connection, fork: Callable[[], Worker], place: Launched) -> bool:
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
        """Carry out an order of rank 0's engine; without a worker, only START."""
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
            worker.send(pack_value(replace(order, folder=os.getcwd(), path=tuple(sys.path))))
        elif word == LEAVE:
            worker.send(pack_value(None))
        elif word == KILL:
            self.end_worker()
        elif word == WHERE:
            (standing,) = locate_workers([worker], _STACK_S)
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


_JOIN_S = 60.0
"""How long the processes of a world may take to find each other."""
_CLOSE_S = 5.0
_START_S = 60.0
"""How long a worker may take to start: its fork server imports torch, at the same time as all others."""
_ANSWER_S = 1.0
"""How long a rank may take to answer where it stands."""
_GONE = ProcessEnd("its launched process is gone")
_TERMINATED = "the launcher ends this world (SIGTERM): one of its processes ended, or the job was stopped"


def is_to_serve() -> bool:
    """Whether this process is to serve rank 0's engine. Raises RequestError without the environment of a launcher."""
    return not launched_world(os.environ).drives


def serve_driver() -> int:
    """The life of every process but rank 0's; nothing is printed. Returns the exit status: 0, 3 when rank 0 vanished,
    130 after a Ctrl-C. Raises MachineError when rank 0 cannot be reached.
    """
    place = launched_world(os.environ)
    try:
        store = place.store(_JOIN_S)
        link = join_driver(place, store, _JOIN_S)
        return 0 if serve_by_workers(link, place) else MachineError.exit_status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def dismiss_world() -> None:
    """Rank 0 does not use the world with which it was launched: let every other process end."""
    TorchrunEngine().close()


class TorchrunEngine(Engine):
    """Rank 0's engine, opened once all others have joined; closing it ends them. Raises RequestError on other ranks."""

    name = "torchrun"
    remote = True

    def __init__(self) -> None:
        self._place = place = launched_world(os.environ)
        if not place.drives:
            rule = "only rank 0 drives, every other rank serves it"
            legal = "serve_driver() on this rank"
            raise RequestError(f"engine=torchrun: this is rank {place.rank}; {rule}; legal: {legal}")
        self._runs = 0
        self._session = secrets.token_hex(4)
        self._terminated = terminated = threading.Event()
        self._handlers = ExitStack()
        self._store = place.store(_JOIN_S)
        self._links = gather_connections(place, self._store, _JOIN_S)
        self._links[0], theirs = Pipe()
        self._own = threading.Thread(target=serve_by_workers, args=(theirs, place), name="rank 0", daemon=True)
        self._own.start()
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, lambda *_: terminated.set())  # torchrun: a process has ended
            self._handlers.callback(signal.signal, signal.SIGTERM, before)

    @property
    def largest_world(self) -> int:
        """How many ranks were launched."""
        return self._place.world_size

    def run_request(self, request: RunRequest, observer: Observer | None) -> list[Any]:
        """The results by rank; see Engine.run. Raises RequestError for more ranks than were launched."""
        self._require_open()
        if request.world_size > (size := self._place.world_size):
            rule = f"must be from 1 to {size}, the number of processes that were launched"
            legal = f"torchrun --nproc-per-node {request.world_size} ..."
            raise RequestError(f"world_size {request.world_size}: {rule}; legal: {legal}")
        self._runs += 1
        order = RunOrder(
            number=self._runs,
            world_size=request.world_size,
            seed=request.seed,
            program=pack_program(request, observer),
            store_prefix=f"shardproof/{self._session}/{self._runs}",
            connection=self._runs,
        )
        links = {rank: self._links[rank] for rank in range(request.world_size)}
        workers = LaunchedWorkers(order, links, self._terminated.is_set)
        supervisor = Supervisor(workers, request.timeout_s, self.alive)
        self.unwaited = ()
        values = supervisor.results()
        self.unwaited = supervisor.find_unwaited()
        return values

    def _release(self) -> None:
        """Let every process end."""
        for link in self._links.values():
            with suppress(OSError):  # its process is gone already
                link.send((END, 0))
        self._own.join(_CLOSE_S)
        links: list[Any] = list(self._links.values())
        end_s = time.monotonic() + _CLOSE_S
        while links and (ready := wait(links, max(0.0, end_s - time.monotonic()))):
            for other in ready:  # this process may hold the store that the others use: wait until all have closed
                try:
                    other.recv_bytes()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    links.remove(other)
        self._handlers.close()


class LaunchedWorkers(Workers):
    """A connection to the agent of every rank. `ending`: whether the launcher ends the world."""

    look_s = 0.3
    settle_s = 0.1
    one_clock = False

    def __init__(self, order: RunOrder, links: Mapping[int, Connection], ending: Callable[[], bool]) -> None:
        super().__init__([functools.partial(self._take_sent_records, rank) for rank in links])
        self._order = order
        self._links = dict(links)
        self._ending = ending
        self._started = False
        self._answered: set[int] = set()
        self._standing: dict[int, Standing] = {}
        self._recorded = [ReadCalls() for _ in links]

    def _take_sent_records(self, rank: int) -> ReadCalls:
        """The records that a rank has sent of its flight recorder."""
        calls = self._recorded[rank]
        self._recorded[rank] = calls._replace(new=())
        return calls

    @property
    def terminated(self) -> str:
        """Why the launcher ends the world; "" if it does not."""
        return _TERMINATED if self._ending() else ""

    def start(self) -> bool:
        """Have a worker of every rank, new where there is none, and send it the order; False when one did not start."""
        self._ask(START, _START_S)
        if self.died or self.terminated or set(self.pending_ranks()) - self._answered:
            return False
        self._started = True
        for rank in self._links:
            self._send(rank, RUN, replace(self._order, rank=rank))
        return True

    def listen(self, limit_s: float) -> None:
        """Take in what the pending ranks send first."""
        links = {self._links[rank]: rank for rank in self.pending_ranks()}
        for link in wait(list(links), limit_s):
            self._receive(links[link])  # type: ignore[index]

    def refresh(self) -> None:
        """Have the pending ranks send their recorded calls."""
        self._ask(CALLS, _ANSWER_S)

    def locate(self) -> Mapping[int, Standing]:
        """Where the pending ranks stand now."""
        self._standing.clear()
        self._ask(WHERE, _ANSWER_S)
        return dict(self._standing)

    def release(self, *, failed: bool) -> None:
        """Let the ranks leave their worlds; after a failure, end their processes."""
        for rank in self._links:
            self._send(rank, KILL if failed else LEAVE, self._order.number)

    def _ask(self, word: str, limit_s: float) -> None:
        """Send the word to every pending rank, and listen until all have answered."""
        self._answered.clear()
        for rank in self.pending_ranks():
            self._send(rank, word, self._order.number)
        end_s = time.monotonic() + limit_s
        while set(self.pending_ranks()) - self._answered and (left_s := end_s - time.monotonic()) > 0:
            if self.terminated:
                return
            self.listen(min(left_s, self.look_s))

    def _send(self, rank: int, word: str, content: object) -> None:
        try:
            self._links[rank].send((word, content))
        except OSError:
            self.died.setdefault(rank, _GONE)

    def _receive(self, rank: int) -> None:
        try:
            number, progress = self._links[rank].recv()
        except (EOFError, OSError):
            self.died[rank] = _GONE
            return
        if number != self._order.number:
            return
        self._recorded[rank] = progress.calls._replace(new=(*self._recorded[rank].new, *progress.calls.new))
        if progress.end is not None:
            by_program = progress.end.by_program and self._started
            self.died[rank] = progress.end._replace(by_program=by_program)
        elif progress.report:
            report: WorkerReport = unpack_value(progress.report)
            if report.result is not None:  # the rank may be on another machine, with another clock
                report = replace(report, result=replace(report.result, at_s=time.monotonic()))
            self.reports[rank] = report
        else:
            self._answered.add(rank)
            if progress.standing is not None:
                self._standing[rank] = progress.standing
