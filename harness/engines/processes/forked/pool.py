"""The pool engine: every rank a process that is kept from run to run, connected by gloo, or NCCL on GPUs.

Ranks are forked from servers that have imported torch once, so a new one costs milliseconds. There are two servers, in
which Python hashes strings with different seeds. So ranks do not iterate over a set in the same order, as on a cluster.
The seeds differ within every aligned group of ranks whose size and stride are powers of two. Ranks receive programs by
reference, their arguments as pickles, and answer with pickles. A run that fails ends in an error of the in-process
engine, in RankCrashed or in RankDied. Its processes are killed and the next run gets new ones. State that a program
leaves in its process (globals of modules, caches) is there in the next run, as in any process that lives on.

No file is left, and no process outlives the driver: forked.fork_server.
"""

import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from torch.distributed import TCPStore

from shardproof.harness.engines.engine import Engine, RunRequest, Unwaited
from shardproof.harness.engines.processes.forked.fork_server import ForkServer, Worker
from shardproof.harness.engines.processes.forked.stacks import standings
from shardproof.harness.engines.processes.messages import (
    RunOrder,
    Standing,
    WorkerReport,
    packed,
    packed_program,
    unpacked,
)
from shardproof.harness.engines.processes.supervisor import Supervisor, Workers
from shardproof.harness.errors import MachineError
from shardproof.harness.ledger import Observer

_HOST = "127.0.0.1"
_MOST_IDLE = 16
"""Processes kept between runs."""
_MOST_KEPT = 32
"""Groups that a process keeps connected before all are closed and made again as needed."""
_RUNS_PER_STORE = 500
_HASH_SEEDS = (1, 2)
"""Of the servers; fixed, so that runs repeat."""


_ANSWER_S = 2.0
"""How long ranks may take to print where they stand."""


def hash_seed(place: int) -> int:
    """The hash seed of the rank at this place: the parity of its binary digits, so that no power of two is a period."""
    return _HASH_SEEDS[place.bit_count() % len(_HASH_SEEDS)]


class PoolEngine(Engine):
    """Runs programs on ranks that are processes of this machine. Programs and results must be picklable."""

    name = "pool"
    remote = True

    def __init__(self) -> None:
        self._pool = _Pool()
        weakref.finalize(self, _Pool.close, self._pool)

    def run_request(self, request: RunRequest, observer: Observer | None) -> list[Any]:
        """The results by rank; see Engine.run."""
        self._require_open()
        sent = packed_program(request, observer)
        self.unwaited = ()
        values, self.unwaited = self._pool.run(request, sent, self.alive)
        return values

    def _release(self) -> None:
        self._pool.close()


class _Pool:
    """The processes, and the store in which they find each other."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._servers: dict[int, ForkServer] = {}
        self._processes: list[Worker] = []
        self._store: Any = None
        self._number = self._connection = 0

    def run(
        self, request: RunRequest, program: bytes, alive: Callable[[], object]
    ) -> tuple[list[Any], tuple[Unwaited, ...]]:
        """Perform a run: the values, and the works that were never waited for. `alive` is the engine's.

        After anything but a good end its processes are replaced. Raises what Supervisor.results raises.
        """
        processes = self._taken(request.world_size, alive)
        alive()
        self._number += 1
        if self._store is None or self._number % _RUNS_PER_STORE == 0:
            self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        order = RunOrder(
            number=self._number,
            world_size=request.world_size,
            seed=request.seed,
            program=program,
            store=(_HOST, self._store.port),
            store_prefix=f"{self._number}/",
            connection=self._connection,
            folder=os.getcwd(),
            path=tuple(sys.path),
        )
        reusable = False
        try:
            workers = _ForkedWorkers(processes, order)
            supervisor = Supervisor(workers, request.timeout_s, alive)
            values = supervisor.results()
            reports = [report for report in workers.reports if report is not None]
            self._connection += sum(report.kept_groups > _MOST_KEPT for report in reports)
            reusable = all(report.reusable for report in reports)
            return values, supervisor.unwaited()
        finally:
            if not reusable:
                self._replace(processes)

    def close(self) -> None:
        """End everything; in a process that was forked from the owner, nothing."""
        if os.getpid() != self._owner:
            return
        for server in self._servers.values():
            server.close()
        for process in self._processes:
            process.close()
        self._processes, self._servers, self._store = [], {}, None

    def _taken(self, world_size: int, alive: Callable[[], object]) -> list[Worker]:
        """The processes of a run, by rank; new ones as far as needed, idle ones beyond the bound ended."""
        try:
            taken = self._forked(world_size, alive)
        except MachineError:  # a server was killed: start over once
            self.close()
            taken = self._forked(world_size, alive)
        for process in self._processes[max(world_size, _MOST_IDLE) :]:
            process.close()
        del self._processes[max(world_size, _MOST_IDLE) :]
        return taken

    def _forked(self, world_size: int, alive: Callable[[], object]) -> list[Worker]:
        """A process for every rank, with its hash seed; connections made before are of no use to a new one."""
        seeds = [hash_seed(place) for place in range(world_size)]
        for seed in dict.fromkeys(seeds):  # all start before the first is waited for
            if seed not in self._servers:
                self._servers[seed] = ForkServer(seed)
        for server in self._servers.values():
            server.await_ready(alive)
        idle, taken = list(self._processes), list[Worker]()
        for seed in seeds:
            worker = next((process for process in idle if process.server.hash_seed == seed), None)
            if worker is None:
                worker = self._servers[seed].fork()
                self._processes.append(worker)
                self._connection += 1
            else:
                idle.remove(worker)
            taken.append(worker)
        self._processes = taken + idle
        return taken

    def _replace(self, processes: Sequence[Worker]) -> None:
        """Kill these processes; the next run forks others, whose connections are new."""
        self._connection += 1
        self._processes = [process for process in self._processes if process not in processes]
        try:
            for server in self._servers.values():
                server.kill([process for process in processes if process.server is server])
        except MachineError:  # a server has ended, and its ranks with it
            self.close()
        for process in processes:
            process.close()


class _ForkedWorkers(Workers):
    """Forked processes by rank, with flight recorders in memory shared with them, and the order of a run."""

    look_s = 0.05
    settle_s = 0.3
    one_clock = True

    def __init__(self, processes: Sequence[Worker], order: RunOrder) -> None:
        super().__init__([process.recording.read for process in processes])
        self._processes = processes
        self._order = order
        self._open = {process.pipe: rank for rank, process in enumerate(processes)}
        for process in processes:
            process.recording.begin(order.number)

    def start(self) -> bool:
        """Send every process its order."""
        for rank, process in enumerate(self._processes):
            process.send(packed(replace(self._order, rank=rank)))
        return True

    def listen(self, limit_s: float) -> None:
        """Take in reports and deaths. Raises MachineError when a fork server has ended."""
        servers = {process.server for process in self._processes}
        ready = wait([*self._open, *(server.pipe for server in servers)], limit_s)
        for server in servers:
            if server.pipe in ready:
                server.listen(_ANSWER_S)
        for pipe, rank in list(self._open.items()):
            if pipe in ready:
                try:
                    report: WorkerReport = unpacked(pipe.recv_bytes())
                except (EOFError, OSError):
                    del self._open[pipe]
                    self.died[rank] = self._processes[rank].end(0.0)
                    continue
                if report.number == self._order.number:
                    self.reports[rank] = report

    def locate(self) -> Mapping[int, Standing]:
        """The stacks of the ranks, which their processes print on a signal."""
        ranks = self.pending()
        return dict(zip(ranks, standings([self._processes[rank] for rank in ranks], _ANSWER_S), strict=True))

    def await_ends(self) -> None:
        """Wait until the fork servers have reported how every process ended that is gone."""
        self.died = {rank: self._processes[rank].end() for rank in self.died}

    def release(self, *, failed: bool) -> None:
        """Let the ranks leave their worlds; those of a failed run are killed by the pool."""
        if not failed:
            for process in self._processes:
                process.send(packed(None))
