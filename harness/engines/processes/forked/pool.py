"""The pool engine: every rank a process that is kept from run to run, connected by gloo, or NCCL on GPUs.

Ranks are forked from servers that have imported torch once, so a new one costs milliseconds. There are two servers, in
which Python hashes strings with different seeds, so that ranks do not iterate over a set in the same order, as on a
cluster: the seeds differ in every group of two, four or eight neighbours or strided ranks. They receive programs by
reference, cases and seeds, never tensors, and answer with pickles. A run that fails in any way ends in the same errors
as in the in-process engine; its processes are killed and the next run gets new ones. What a program leaves in its
process (globals of modules, caches) is there in the next run, as in any process that lives on.

No file is left, and no process outlives the driver: forked.fork_server.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from torch.distributed import TCPStore

from harness.engines.engine import RequestEngine, RunRequest, Unwaited
from harness.engines.processes.forked.fork_client import ForkServer, PoolWorker
from harness.engines.processes.forked.link import HOST, ForkedOrder
from harness.engines.processes.forked.workers import ForkedWorkers
from harness.engines.processes.messages import RunOrder, packed_program
from harness.engines.processes.supervisor import Supervisor
from harness.errors import MachineError
from harness.ledger import Observer

_MOST_IDLE = 16
"""Processes kept between runs."""
_MOST_KEPT = 32
"""Groups that a process keeps connected before all are closed and made again as needed."""
_RUNS_PER_STORE = 500
_HASH_SEEDS = (1, 2)
"""Of the servers; fixed, so that runs repeat."""


def _hash_seed(place: int) -> int:
    """The hash seed of the rank at this place: the parity of its binary digits, so that no power of two is a period."""
    return _HASH_SEEDS[place.bit_count() % len(_HASH_SEEDS)]


class PoolEngine(RequestEngine):
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
        values, self.unwaited = self._pool.run(request, sent)
        return values

    def _release(self) -> None:
        self._pool.close()


class _Pool:
    """The processes, and the store in which they find each other."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._servers: dict[int, ForkServer] = {}
        self._processes: list[PoolWorker] = []
        self._store: Any = None
        self._number = self._connection = 0

    def run(self, request: RunRequest, program: bytes) -> tuple[list[Any], tuple[Unwaited, ...]]:
        """One run: the values, and the works that were never waited for.

        After anything but a good end its processes are replaced. Raises what Supervisor.results raises.
        """
        processes = self._taken(request.world_size)
        self._number += 1
        if self._store is None or self._number % _RUNS_PER_STORE == 0:
            self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        reusable = False
        workers = ForkedWorkers(processes, [self._order(request, program, rank) for rank in range(len(processes))])
        try:
            supervisor = Supervisor(workers, request.timeout_s)
            values = supervisor.results()
            reports = [report for report in workers.reports if report is not None]
            self._connection += sum(report.kept_groups > _MOST_KEPT for report in reports)
            reusable = all(report.reusable for report in reports)
            return values, supervisor.unwaited()
        finally:
            workers.close()
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

    def _order(self, request: RunRequest, program: bytes, rank: int) -> ForkedOrder:
        run = RunOrder(
            number=self._number,
            rank=rank,
            world_size=request.world_size,
            seed=request.seed,
            timeout_s=request.timeout_s,
            program=program,
            store_prefix=f"{self._number}/",
        )
        return ForkedOrder(
            run=run, connection=self._connection, port=self._store.port, folder=os.getcwd(), path=tuple(sys.path)
        )

    def _taken(self, world_size: int) -> list[PoolWorker]:
        """The processes of a run, by rank; new ones as far as needed, idle ones beyond the bound ended."""
        try:
            taken = self._forked(world_size)
        except MachineError:  # a server was killed: start over once
            self.close()
            taken = self._forked(world_size)
        for process in self._processes[max(world_size, _MOST_IDLE) :]:
            process.close()
        del self._processes[max(world_size, _MOST_IDLE) :]
        return taken

    def _forked(self, world_size: int) -> list[PoolWorker]:
        """A process for every rank, with its hash seed; connections made before are of no use to a new one."""
        seeds = [_hash_seed(place) for place in range(world_size)]
        for seed in dict.fromkeys(seeds):  # all start before the first is waited for
            if seed not in self._servers:
                self._servers[seed] = ForkServer(seed)
        idle, taken = list(self._processes), list[PoolWorker]()
        for seed in seeds:
            found = next((process for process in idle if process.server.hash_seed == seed), None)
            if found is None:
                found = self._servers[seed].fork()
                self._processes.append(found)
                self._connection += 1
            else:
                idle.remove(found)
            taken.append(found)
        self._processes = taken + idle
        return taken

    def _replace(self, processes: Sequence[PoolWorker]) -> None:
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
