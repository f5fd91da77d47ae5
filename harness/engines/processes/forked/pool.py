"""The pool engine: every rank a process that is kept from run to run, connected by gloo, or NCCL on GPUs.

Ranks are forked from servers that have imported torch once, so a new one costs milliseconds. There are two servers, in
which Python hashes strings with different seeds. So ranks do not iterate over a set in the same order, as on a cluster.
The seeds differ within every aligned group of ranks whose size and stride are powers of two. Ranks receive programs by
reference, their arguments as pickles, and answer with pickles. A run that fails ends in an error of the in-process
engine, in RankCrashed or in RankDied. Its processes are killed and the next run gets new ones. State that a program
leaves in its process (globals of modules, caches) is there in the next run, as in any process that lives on.

No file is left, and no process outlives the driver: forked.fork_server, processes.workers.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any

from torch.distributed import TCPStore

from shardproof.harness.engines.engine import Engine, RunRequest, Unwaited
from shardproof.harness.engines.processes.exit_status import ProcessEnd
from shardproof.harness.engines.processes.forked.fork_server import ForkServer
from shardproof.harness.engines.processes.forked.worker import serve
from shardproof.harness.engines.processes.messages import (
    RunOrder,
    Standing,
    WorkerReport,
    packed,
    packed_program,
    unpacked,
)
from shardproof.harness.engines.processes.stacks import standings
from shardproof.harness.engines.processes.supervisor import Supervisor, Workers
from shardproof.harness.engines.processes.workers import Worker, receive
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
        self._close_pool = Finalize(self, _Pool.close, [self._pool], exitpriority=0)  # not in a fork of this process

    def run_request(self, request: RunRequest, observer: Observer | None) -> list[Any]:
        """The results by rank; see Engine.run."""
        self._require_open()
        sent = packed_program(request, observer)
        self.unwaited = ()
        values, self.unwaited = self._pool.run(request, sent, self.alive)
        return values

    def _release(self) -> None:
        self._close_pool()


class _Pool:
    """The processes, and the store in which they find each other."""

    def __init__(self) -> None:
        self._servers = {seed: ForkServer(seed) for seed in _HASH_SEEDS}
        self._seeds: dict[Worker, int] = {}
        self._store: Any = None
        self._number = self._connection = 0

    def run(
        self, request: RunRequest, program: bytes, alive: Callable[[], object]
    ) -> tuple[list[Any], tuple[Unwaited, ...]]:
        """Perform a run: the values, and the works that were never waited for. `alive` is the engine's.

        After anything but a good end its processes are replaced. Raises what Supervisor.results raises.
        """
        ranks = self._taken(request.world_size, alive)
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
            workers = _ForkedWorkers(ranks, order)
            supervisor = Supervisor(workers, request.timeout_s, alive)
            values = supervisor.results()
            reports = [report for report in workers.reports if report is not None]
            self._connection += sum(report.kept_groups > _MOST_KEPT for report in reports)
            reusable = all(report.reusable for report in reports)
            return values, supervisor.unwaited()
        finally:
            if not reusable:
                self._connection += 1
                self._end(ranks)

    def close(self) -> None:
        """End everything."""
        self._end([*self._seeds])
        for server in self._servers.values():
            server.close()
        self._store = None

    def _taken(self, world_size: int, alive: Callable[[], object]) -> list[Worker]:
        """The processes of a run, by rank; new ones as far as needed, idle ones beyond the bound ended.

        Each has the hash seed of its place. Connections made before are of no use to a new one.
        """
        self._end([worker for worker in self._seeds if worker.process.exitcode is not None])
        seeds = [hash_seed(place) for place in range(world_size)]
        idle, taken = dict(self._seeds), list[Worker]()
        for server in self._servers.values():
            server.alive = alive
        for seed in {*seeds} - {*idle.values()}:  # all start before the first is waited for
            self._servers[seed].ensure_running()
        for seed in seeds:
            worker = next((worker for worker, its in idle.items() if its == seed), None)
            if worker is None:
                worker = self._servers[seed].start(serve)
                self._seeds[worker] = seed
                self._connection += 1
            else:
                del idle[worker]
            taken.append(worker)
        self._end([*idle][max(_MOST_IDLE - world_size, 0) :])
        return taken

    def _end(self, workers: Sequence[Worker]) -> None:
        """End these processes."""
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.close()
            del self._seeds[worker]


class _ForkedWorkers(Workers):
    """Forked processes by rank, with flight recorders in memory shared with them, and the order of a run."""

    look_s = 0.05
    settle_s = 0.3
    one_clock = True

    def __init__(self, ranks: Sequence[Worker], order: RunOrder) -> None:
        super().__init__([worker.recording.read for worker in ranks])
        self._ranks, self._order = {worker: rank for rank, worker in enumerate(ranks)}, order
        for worker in ranks:
            worker.recording.begin(order.number)

    def start(self) -> bool:
        """Send every process its order."""
        for worker, rank in self._ranks.items():
            worker.send(packed(replace(self._order, rank=rank)))
        return True

    def listen(self, limit_s: float) -> None:
        """Take in reports and deaths."""
        alive = {worker: rank for worker, rank in self._ranks.items() if rank not in self.died}
        for rank, message in receive(alive, limit_s):
            if isinstance(message, ProcessEnd):
                self.died[rank] = message
                continue
            report: WorkerReport = unpacked(message)
            if report.number == self._order.number:
                self.reports[rank] = report

    def locate(self) -> Mapping[int, Standing]:
        """The stacks of the ranks, which their processes print on a signal."""
        pending = self.pending()
        workers = [worker for worker, rank in self._ranks.items() if rank in pending]
        return dict(zip(pending, standings(workers, _ANSWER_S), strict=True))

    def release(self, *, failed: bool) -> None:
        """Let the ranks leave their worlds; those of a failed run are killed by the pool."""
        if not failed:
            for worker in self._ranks:
                worker.send(packed(None))
