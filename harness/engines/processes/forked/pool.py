"""The pool engine: every rank a process that is kept from run to run, connected by gloo, or NCCL on GPUs.

Ranks are forked from servers that have imported torch once, so a new one costs milliseconds. There are two servers with
different hash seeds: as on a cluster, ranks iterate over a set of strings in different orders. In a mesh whose sizes
are powers of two, every group of several ranks has both seeds. Ranks receive programs by reference, their arguments as
pickles, and answer with pickles. A run that fails ends in an error of the in-process engine, in RankCrashed or in
RankDied. Its processes are killed and the next run gets new ones. State that a program leaves in its process (globals
of modules, caches) is there in the next run, as in any process that lives on.

The fork server of multiprocessing is not used: there is only one, it has the hash seed of the driver, and its socket
stays in the file system when the driver is killed. Ours leave no file, and no process of theirs outlives the driver.
They run in sessions of their own, so that Ctrl-C reaches the driver alone. Every wait for a rank is bounded; times are
seconds.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import connection, forkserver, resource_tracker, util
from multiprocessing.util import Finalize
from typing import Any

from torch.distributed import TCPStore

from shardproof.harness.engines.engine import Engine, RunRequest, Unwaited
from shardproof.harness.engines.processes.forked.worker import serve_orders
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
from shardproof.harness.engines.rank_environment import ONE_THREAD
from shardproof.harness.errors import MachineError
from shardproof.harness.interpreter import boot
from shardproof.harness.ledger import Observer
from shardproof.harness.torch_internals.lookup import replace_attribute

_PRELOADED = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",  # else the first backward of each process imports it, in 0.35 s
    "shardproof.harness.running.ranks.execution",
    "shardproof.harness.engines.processes.forked.worker",
)
_START_S = 120.0
_LOOK_S = 1.0
"""How often a waiting driver calls `alive`."""
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Added where the environment sets no level: torch would print a native stack when the driver of a store is killed."""

_ABANDONED = """sys.excepthook = lambda kind, *rest: kind is EOFError or sys.__excepthook__(kind, *rest)
"""
"""A line of the server's program. While the server still loads torch, a driver may request a worker and end before it
sends what to run. That worker meets the end of the file, and ends without a traceback.
"""


class ForkServer(forkserver.ForkServer):
    """A fork server that hashes strings with `hash_seed`, as its workers do.

    The server is started when a worker is requested and none runs. `alive` is called while the driver waits for it.
    """

    _forkserver_address: Any
    _forkserver_alive_fd: Any
    _forkserver_pid: int | None

    def __init__(self, hash_seed: int) -> None:
        super().__init__()
        self.hash_seed = hash_seed
        self.alive: Callable[[], object] = str
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = -1
        self.set_forkserver_preload([*_PRELOADED])

    def start(self, target: Callable[..., object]) -> Worker:
        """A new worker that calls `target`. Raises MachineError when none can be started."""
        try:
            with replace_attribute(forkserver, "connect_to_new_process", self.connect_to_new_process):
                return Worker(multiprocessing.get_context("forkserver"), target, leads=True)
        except (EOFError, OSError, subprocess.TimeoutExpired) as problem:
            why = str(problem) if isinstance(problem, TimeoutError) else "it has ended; its messages are on stderr"
            if isinstance(problem, subprocess.TimeoutExpired):
                why = f"it did not end within {problem.timeout:g} s"
            raise MachineError(f"the fork server of the pool failed: {why}") from problem

    def ensure_running(self) -> None:
        """Start the server unless it runs. Then unlink its socket, which is reached by its descriptor from then on."""
        resource_tracker.ensure_running()
        with (
            replace_attribute(util, "spawnv_passfds", self._spawn_server),
            replace_attribute(connection, "arbitrary_address", lambda _family: tempfile.mktemp(prefix="shardproof-")),
        ):
            super().ensure_running()
        if not self._forkserver_address.startswith("/proc/"):
            self._release()
            self._socket = os.open(self._forkserver_address, os.O_PATH | os.O_CLOEXEC)
            os.unlink(self._forkserver_address)
            self._forkserver_address = f"/proc/self/fd/{self._socket}"

    def connect_to_new_process(self, fds: Sequence[int]) -> tuple[int, int]:
        """As the base class does. Raises TimeoutError when the server does not answer."""
        ends: tuple[int, int]
        try:
            ends = super().connect_to_new_process(fds)
        except ConnectionError:  # the server was just killed: its socket closes before its end can be awaited
            self._forget(_START_S)
            ends = super().connect_to_new_process(fds)
        until_s = time.monotonic() + _START_S
        while not connection.wait([ends[0]], _LOOK_S):
            self.alive()
            if time.monotonic() > until_s:
                for descriptor in ends:
                    os.close(descriptor)
                raise TimeoutError(f"no answer within {_START_S:g} s")
        return ends

    def close(self) -> None:
        """End the server. Its workers have ended before."""
        if self._forkserver_pid is not None and self._process is not None:
            self._process.kill()
            self._forget()

    def _forget(self, limit_s: float | None = None) -> None:
        """Wait until the server has ended, so that the next request starts another one."""
        if self._forkserver_pid is not None and self._process is not None:
            self._process.wait(limit_s)
            self._forkserver_pid = None
            os.close(self._forkserver_alive_fd)
            self._release()

    def _release(self) -> None:
        if self._socket >= 0:
            os.close(self._socket)
        self._socket = -1

    def _spawn_server(self, _path: str, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        """Start Python with these arguments, the last of which is its program."""
        if self._process is not None:  # it has ended
            self._process.wait()
        self._process = subprocess.Popen(
            [*arguments[:-1], boot() + _ABANDONED + arguments[-1]],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env=_QUIET | dict(os.environ) | ONE_THREAD | {"PYTHONHASHSEED": str(self.hash_seed)},
            start_new_session=True,
        )
        return self._process.pid


_HOST = "127.0.0.1"
_MOST_IDLE = 16
"""A run begins with at most this many processes, its own ranks included, unless it has more ranks."""
_MOST_KEPT = 32
"""Groups that a process keeps connected before all are closed and made again as needed."""
_RUNS_PER_STORE = 500
_HASH_SEEDS = (1, 2)
"""The hash seed of each server. They are fixed, so that a run can be repeated."""


_ANSWER_S = 2.0
"""How long ranks may take to print where they stand."""


def hash_seed(place: int) -> int:
    """The hash seed of the rank at this place, by the parity of its binary digits: no power of two is a period."""
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
        sent = pack_program(request, observer)
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
        """Run a program: the values, and the works that were never waited for. `alive` is the engine's.

        If the run fails, or leaves threads, its processes are ended. Raises what Supervisor.results raises.
        """
        ranks = self._take_workers(request.world_size, alive)
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
            return values, supervisor.find_unwaited()
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

    def _take_workers(self, world_size: int, alive: Callable[[], object]) -> list[Worker]:
        """The processes of a run, by rank: idle ones, and new ones if there are too few. Ends those beyond _MOST_IDLE.

        Each has the hash seed of its place. A new process has no part in existing connections, so all are made again.
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
                worker = self._servers[seed].start(serve_orders)
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
            worker.send(pack_value(replace(self._order, rank=rank)))
        return True

    def listen(self, limit_s: float) -> None:
        """Take in reports and deaths."""
        alive = {worker: rank for worker, rank in self._ranks.items() if rank not in self.died}
        for rank, message in receive(alive, limit_s):
            if isinstance(message, ProcessEnd):
                self.died[rank] = message
                continue
            report: WorkerReport = unpack_value(message)
            if report.number == self._order.number:
                self.reports[rank] = report

    def locate(self) -> Mapping[int, Standing]:
        """The stacks of the ranks, which their processes print on a signal."""
        pending = self.pending_ranks()
        workers = [worker for worker, rank in self._ranks.items() if rank in pending]
        return dict(zip(pending, locate_workers(workers, _ANSWER_S), strict=True))

    def release(self, *, failed: bool) -> None:
        """Let the ranks leave their worlds; those of a failed run are killed by the pool."""
        if not failed:
            for worker in self._ranks:
                worker.send(pack_value(None))
