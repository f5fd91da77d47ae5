"""The pool engine: every rank a process that is kept from run to run, connected by gloo, or NCCL on GPUs.

Ranks are forked from servers that have imported torch once, so a new one costs milliseconds. There are two servers, in
which Python hashes strings with different seeds, so that ranks do not iterate over a set in the same order, as on a
cluster: the seeds differ in every group of two, four or eight neighbours or strided ranks. They are sent programs by
reference, cases and seeds, never tensors, and answer with pickles. A run that goes wrong in any way ends in the same
errors as in the in-process engine; its processes are killed and the next run gets new ones. What a program leaves in
its process (globals of modules, caches) is there in the next run, as in any process that lives on.

Nothing is in a file system and nobody outlives the driver: harness.engines.processes.forked.fork_server.
"""

from __future__ import annotations

import os
import pickle
import sys
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from torch.distributed import TCPStore

from harness.engines.engine import Program, Unwaited
from harness.engines.processes import messages as mailbox
from harness.engines.processes.forked.fork_client import ForkServer, RankProcess
from harness.engines.processes.forked.rank_loop import HOST, Job
from harness.engines.processes.forked.supervision import Supervision
from harness.errors import MachineError, RequestError, error_text
from harness.ledger import Observer

__all__ = ["PoolEngine"]

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


class PoolEngine:
    """Runs programs on ranks that are processes of this machine. Programs and results must be picklable."""

    name = "pool"
    remote = True

    def __init__(self) -> None:
        self._pool = _Pool()
        weakref.finalize(self, _Pool.close, self._pool)
        self._closed = False
        self.unwaited: tuple[Unwaited, ...] = ()

    def run(
        self,
        program: Program,
        *args: Any,
        world_size: int,
        observer: Observer | None = None,
        seed: int = 0,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """The results of `program(rank, *args)` by rank; see Engine.run."""
        self._check(world_size, observer, timeout_s)
        try:
            sent = mailbox.packed((program, args))
        except Exception as problem:  # whatever a user's own pickling raises
            rule = f"cannot be sent to the processes of the ranks ({error_text(problem)})"
            raise RequestError(f"program {program!r}: {rule}; legal: a function of a module") from problem
        self.unwaited = ()
        values, self.unwaited = self._pool.run(sent, world_size, seed, timeout_s)
        return values

    def close(self) -> None:
        """End all processes and refuse further runs."""
        self._pool.close()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, world_size: int, observer: Observer | None, timeout_s: float) -> None:
        if self._closed:
            raise RequestError("run: the engine is closed; legal: a new PoolEngine()")
        if observer is not None:
            raise RequestError(
                "observer: ranks are other processes; legal: harness.running.rank_task, which observes there"
            )
        if world_size < 1:
            raise RequestError(f"world_size {world_size}: must be at least 1; legal: 2")
        if not timeout_s > 0:
            raise RequestError(f"timeout_s {timeout_s}: must be above 0; legal: 60")


class _Pool:
    """The processes, and the store in which they find each other."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._servers: dict[int, ForkServer] = {}
        self._ranks: list[RankProcess] = []
        self._store: Any = None
        self._run = self._link = 0

    def run(
        self, program: bytes, world_size: int, seed: int, timeout_s: float
    ) -> tuple[list[Any], tuple[Unwaited, ...]]:
        """One run: the values, and the works that nobody waited for.

        Whatever happens but a good end, its processes are replaced.
        """
        ranks = self._taken(world_size)
        self._run += 1
        if self._store is None or self._run % _RUNS_PER_STORE == 0:
            self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        well = False
        try:
            for place, rank in enumerate(ranks):
                rank.reader.begin(self._run)
                job = Job(
                    run=self._run,
                    rank=place,
                    world_size=world_size,
                    link=self._link,
                    port=self._store.port,
                    seed=seed,
                    folder=os.getcwd(),
                    path=tuple(sys.path),
                    program=program,
                )
                _order(rank, pickle.dumps(job), timeout_s)
            supervision = Supervision(ranks, self._run, timeout_s)
            values = supervision.results()
            for rank, reply in zip(ranks, supervision.replies, strict=True):
                _order(rank, pickle.dumps(None), timeout_s)
                rank.reusable = reply is not None and reply.reusable
                if reply is not None and reply.kept > _MOST_KEPT:
                    self._link += 1
            well = all(rank.reusable for rank in ranks)
            return values, supervision.unwaited()
        finally:
            if not well:
                self._replace(ranks)

    def close(self) -> None:
        """End everything; in a process that was forked from the owner, nothing."""
        if os.getpid() != self._owner:
            return
        for server in self._servers.values():
            server.close()
        for rank in self._ranks:
            rank.close()
        self._ranks, self._servers, self._store = [], {}, None

    def _taken(self, world_size: int) -> list[RankProcess]:
        """The processes of a run, by rank; new ones as far as needed, idle ones beyond the bound ended."""
        try:
            taken = self._forked(world_size)
        except MachineError:  # a server was killed: start over once
            self.close()
            taken = self._forked(world_size)
        for rank in self._ranks[max(world_size, _MOST_IDLE) :]:
            rank.close()
        del self._ranks[max(world_size, _MOST_IDLE) :]
        return taken

    def _forked(self, world_size: int) -> list[RankProcess]:
        """A process for every rank, with its hash seed; connections made before are of no use to a new one."""
        seeds = [_hash_seed(place) for place in range(world_size)]
        for seed in dict.fromkeys(seeds):  # all start before the first is waited for
            if seed not in self._servers:
                self._servers[seed] = ForkServer(seed)
        idle, taken = list(self._ranks), list[RankProcess]()
        for seed in seeds:
            found = next((rank for rank in idle if rank.server.hash_seed == seed), None)
            if found is None:
                found = self._servers[seed].fork()
                self._ranks.append(found)
                self._link += 1
            else:
                idle.remove(found)
            taken.append(found)
        self._ranks = taken + idle
        return taken

    def _replace(self, ranks: Sequence[RankProcess]) -> None:
        """Kill these processes; the next run forks others, whose connections are new."""
        self._link += 1
        self._ranks = [rank for rank in self._ranks if rank not in ranks]
        try:
            for server in self._servers.values():
                server.kill([rank for rank in ranks if rank.server is server])
        except MachineError:  # a server has ended, and its ranks with it
            self.close()
        for rank in ranks:
            rank.close()


def _order(rank: RankProcess, message: bytes, limit_s: float) -> None:
    """Send a message. A rank that cannot receive shows as dead or silent to whoever waits for its answer."""
    rank.mailbox.sock.settimeout(limit_s)
    try:
        mailbox.send(rank.mailbox.sock, message)
    except OSError:
        return
    finally:
        rank.mailbox.sock.settimeout(None)
