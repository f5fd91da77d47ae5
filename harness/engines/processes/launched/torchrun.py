"""The torchrun engine: ranks are the processes that torchrun or SLURM launched, on one machine or many.

    torchrun --nnodes 2 --nproc-per-node 4 ... -m reports.cli run "mode=tp tp=8 kv_heads=8" --engine torchrun

Rank 0's process drives: it alone draws, judges and prints. All others call `serve` and end when it does. Orders and
results travel on the control channel (rendezvous), never on the groups under test; every run gets a fresh
default group in child processes (agent), so that what a run breaks is not met by the next. torchrun
itself makes 1 of every status but 0. A case that is smaller than the world runs on its first ranks.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import threading
import time
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import FrameType, TracebackType
from typing import Any, Self

from harness.engines.engine import Program, Unwaited
from harness.engines.processes.launched.agent import END, relay
from harness.engines.processes.launched.answers import Answers
from harness.engines.processes.launched.environment import launched
from harness.engines.processes.launched.rank_child import Order, live
from harness.engines.processes.launched.remote_run import RemoteRun
from harness.engines.processes.launched.rendezvous import gather, join
from harness.errors import MachineError, RequestError, error_text
from harness.ledger import Observer

__all__ = ["TorchrunEngine", "dismiss", "serve", "serves"]

_MEET_S = 60.0
"""How long the processes of a world may take to find each other."""
_CLOSE_S = 5.0


def serves() -> bool:
    """Whether this process is to serve rank 0's. Raises RequestError when no launcher's environment is here."""
    return not launched(os.environ).drives


def serve() -> int:
    """The life of every process but rank 0's; nothing is printed. Returns the exit status, 3 when rank 0 vanished."""
    place = launched(os.environ)
    try:
        store = place.store(_MEET_S)
        hub = join(place, store, _MEET_S)
        return 0 if relay(hub, live, place) else MachineError.exit_status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def dismiss() -> None:
    """Rank 0, when it has no use for the world it was launched with: let every other process end."""
    TorchrunEngine().close()


class TorchrunEngine:
    """Rank 0's engine: it is opened once every other process has joined, and closing it ends them all."""

    name = "torchrun"
    remote = True

    def __init__(self) -> None:
        self._place = place = launched(os.environ)
        if not place.drives:
            rule = "only rank 0 drives, every other rank serves it"
            raise RequestError(f"engine=torchrun: this is rank {place.rank}; {rule}; legal: serve() on this rank")
        self.unwaited: tuple[Unwaited, ...] = ()
        self._closed = False
        self._runs = 0
        self._session = secrets.token_hex(4)
        self._terminated = threading.Event()
        self._held = ExitStack()
        self._store = place.store(_MEET_S)
        self._links = gather(place, self._store, _MEET_S)
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

    def run(
        self,
        program: Program,
        *args: Any,
        world_size: int,
        observer: Observer | None = None,
        seed: int = 0,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """The results of `program(rank, *args)` by rank; see Engine.run. Nobody is observed from here."""
        self._check(world_size, timeout_s)
        self._runs += 1
        order = Order(
            program=_pickled(program, args),
            number=self._runs,
            prefix=f"shardproof/{self._session}/{self._runs}",
            world_size=world_size,
            seed=seed,
            timeout_s=timeout_s,
        )
        answers = Answers(self._runs, {rank: self._links[rank] for rank in range(world_size)}, self._terminated.is_set)
        run = RemoteRun(answers, order)
        self.unwaited = ()
        values = run.results()
        self.unwaited = run.unwaited()
        return values

    def close(self) -> None:
        """Let every process end; a closed engine refuses to run."""
        if self._closed:
            return
        self._closed = True
        for link in self._links.values():
            with suppress(OSError):  # that one is gone already
                link.send_bytes(END)
        self._own.join(_CLOSE_S)
        _drain(list(self._links.values()), time.monotonic() + _CLOSE_S)
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        """torchrun ends a world by this signal as soon as one process has ended: say which before ending."""
        self._terminated.set()

    def _check(self, world_size: int, timeout_s: float) -> None:
        size = self._place.world_size
        if self._closed:
            raise RequestError("run: the engine is closed; legal: a new TorchrunEngine()")
        if not 1 <= world_size <= size:
            rule = f"must be from 1 to {size}, the number of processes that were launched"
            raise RequestError(f"world_size {world_size}: {rule}; legal: torchrun --nproc-per-node {world_size} ...")
        if not timeout_s > 0:
            raise RequestError(f"timeout_s {timeout_s}: must be above 0; legal: 60")


def _drain(links: list[Connection], end_s: float) -> None:
    """The closing barrier: wait until every process has let go, for this one may hold the store they use."""
    while links and (ready := wait(links, max(0.0, end_s - time.monotonic()))):
        for link in ready:
            try:
                link.recv_bytes()  # type: ignore[union-attr]
            except (EOFError, OSError):
                links.remove(link)  # type: ignore[arg-type]


def _pickled(program: Program, args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((program, args))
    except Exception as problem:  # whatever a user's own pickling raises
        rule = f"cannot be sent to the processes of the ranks ({error_text(problem)})"
        raise RequestError(f"program {program!r}: {rule}; legal: a function of a module") from problem
