"""The torchrun engine: ranks are the processes that torchrun or SLURM launched, on one machine or many.

    torchrun --nnodes 2 --nproc-per-node 4 ... -m shardproof run "mode=tp tp=8 kv_heads=8" --engine torchrun

Rank 0's process drives: it alone draws cases, checks and prints. All others call `serve` and end when it does. Orders
and results travel on connections of their own (launched.rendezvous), never on the groups under test; every run gets a
fresh default group in child processes (launched.agent), so that what a run breaks does not reach the next. torchrun
itself makes 1 of every status but 0. A case that is smaller than the world runs on its first ranks.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from harness.engines.engine import RequestEngine, RunRequest
from harness.engines.processes.launched.agent import END, relay
from harness.engines.processes.launched.environment import launched
from harness.engines.processes.launched.link import live
from harness.engines.processes.launched.rendezvous import gather, join
from harness.engines.processes.launched.workers import LaunchedWorkers
from harness.engines.processes.messages import RunOrder, packed_program
from harness.engines.processes.supervisor import Supervisor
from harness.errors import MachineError, RequestError
from harness.ledger import Observer

_JOIN_S = 60.0
"""How long the processes of a world may take to find each other."""
_CLOSE_S = 5.0


def serves() -> bool:
    """Whether this process is to serve rank 0's. Raises RequestError when no launcher's environment is here."""
    return not launched(os.environ).drives


def serve() -> int:
    """The life of every process but rank 0's; nothing is printed. Returns the exit status, 3 when rank 0 vanished.

    Raises MachineError when rank 0 cannot be reached.
    """
    place = launched(os.environ)
    try:
        store = place.store(_JOIN_S)
        link = join(place, store, _JOIN_S)
        return 0 if relay(link, live, place) else MachineError.exit_status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def dismiss() -> None:
    """Rank 0, when it has no use for the world it was launched with: let every other process end."""
    TorchrunEngine().close()


class TorchrunEngine(RequestEngine):
    """Rank 0's engine, opened once all others have joined; closing it ends them. Raises RequestError elsewhere."""

    name = "torchrun"
    remote = True

    def __init__(self) -> None:
        self._place = place = launched(os.environ)
        if not place.drives:
            rule = "only rank 0 drives, every other rank serves it"
            raise RequestError(f"engine=torchrun: this is rank {place.rank}; {rule}; legal: serve() on this rank")
        self._runs = 0
        self._session = secrets.token_hex(4)
        self._terminated = threading.Event()
        self._held = ExitStack()
        self._store = place.store(_JOIN_S)
        self._links = gather(place, self._store, _JOIN_S)
        self._links[0], theirs = Pipe()
        self._own = threading.Thread(target=relay, args=(theirs, live, place), name="rank 0", daemon=True)
        self._own.start()
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, self._on_sigterm)
            self._held.callback(signal.signal, signal.SIGTERM, before)

    @property
    def largest_world(self) -> int:
        """How many ranks were launched."""
        return self._place.world_size

    def run_request(self, request: RunRequest, observer: Observer | None) -> list[Any]:
        """The results by rank; see Engine.run."""
        self._require_open()
        self._require_ranks(request.world_size)
        self._runs += 1
        order = RunOrder(
            number=self._runs,
            rank=0,
            world_size=request.world_size,
            seed=request.seed,
            timeout_s=request.timeout_s,
            program=packed_program(request, observer),
            store_prefix=f"shardproof/{self._session}/{self._runs}",
        )
        links = {rank: self._links[rank] for rank in range(request.world_size)}
        supervisor = Supervisor(LaunchedWorkers(order, links, self._terminated.is_set), request.timeout_s)
        self.unwaited = ()
        values = supervisor.results()
        self.unwaited = supervisor.unwaited()
        return values

    def _release(self) -> None:
        """Let every process end."""
        for link in self._links.values():
            with suppress(OSError):  # that one is gone already
                link.send_bytes(END)
        self._own.join(_CLOSE_S)
        _drain(list(self._links.values()), time.monotonic() + _CLOSE_S)
        self._held.close()

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        """torchrun ends a world by this signal as soon as one process has ended: report which before ending."""
        self._terminated.set()

    def _require_ranks(self, world_size: int) -> None:
        size = self._place.world_size
        if not 1 <= world_size <= size:
            rule = f"must be from 1 to {size}, the number of processes that were launched"
            raise RequestError(f"world_size {world_size}: {rule}; legal: torchrun --nproc-per-node {world_size} ...")


def _drain(links: list[Connection], end_s: float) -> None:
    """The closing barrier: wait until every process has closed, for this one may hold the store they use."""
    while links and (ready := wait(links, max(0.0, end_s - time.monotonic()))):
        for link in ready:
            try:
                link.recv_bytes()  # type: ignore[union-attr]
            except (EOFError, OSError):
                links.remove(link)  # type: ignore[arg-type]
