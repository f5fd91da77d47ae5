"""The child process that is one rank of a launched world: it runs what it is ordered to, and says where it stands.

Programs run in the main thread, as a user's own script would; a second thread reads the orders, so that a rank that is
stuck can still be asked. The child ends when its parent does. Times are seconds.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from harness.callers import caller_of
from harness.engines.launched import Launched
from harness.engines.rank_process import Ended, ended, error_text, seeded, world
from harness.engines.relay import LEAVE, RUN
from harness.errors import Position

__all__ = ["NUMBER_BYTES", "Order", "live"]

NUMBER_BYTES = 8
"""An answer begins with the number of its run."""

_MEET_S = 30.0
"""How long the store may take to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One run, as every rank of it is told. `program` is the pickled pair of program and arguments.

    `prefix` sets the run's keys apart in the store, which all runs share; `number` does so for its answers.
    """

    number: int
    program: bytes
    prefix: str
    world_size: int
    seed: int
    timeout_s: float


def live(pipe: Connection, place: Launched) -> None:
    """The child's life: what the process is started with."""
    os.setpgid(0, 0)  # signals to the launched processes, Ctrl-C among them, are theirs: rank 0 decides what follows
    life = _Life(pipe, place)
    threading.Thread(target=life.listen, name="orders", daemon=True).start()
    life.serve()


class _Life:
    """The orders that came in, and what goes out."""

    def __init__(self, pipe: Connection, place: Launched) -> None:
        self._pipe = pipe
        self._place = place
        self._orders: SimpleQueue[bytes] = SimpleQueue()
        self._speaking = threading.Lock()
        self._main = threading.get_ident()
        self._store: Store | None = None

    def listen(self) -> None:
        """Read orders until the parent is gone; then end at once, for the main thread may wait in native code."""
        try:
            while True:
                order = self._pipe.recv_bytes()
                if order[:1] in {RUN, LEAVE}:
                    self._orders.put(order)
                else:
                    self._say(order[1:], self._position())
        except (EOFError, OSError):
            os._exit(3)

    def serve(self) -> None:
        """Run what comes in, one after another."""
        while True:
            order = self._orders.get()
            if order[:1] == RUN:
                self._run(pickle.loads(order[1:]))

    def _run(self, order: Order) -> None:
        """Run the program in a world of its own, answer, and leave that world when all ranks may."""
        rank, local_rank = self._place.rank, self._place.local_rank
        number, answered = order.number.to_bytes(NUMBER_BYTES, "big"), False
        try:
            program, args = pickle.loads(order.program)
            store = PrefixStore(order.prefix, self._meeting_point())
            with world(rank, order.world_size, store, order.timeout_s, local_rank):
                seeded(order.seed)
                self._say(number, ended(rank, program, args))
                answered = True
                while self._orders.get()[:1] != LEAVE:
                    continue
        except Exception as error:  # a program that is not here, or no world: told like an error of the program
            if not answered:
                self._say(number, Ended(rank=rank, error=error, detail=error_text(error)))

    def _say(self, number: bytes, answer: Any) -> None:
        """Send an answer of this run; one that cannot be pickled is told as the error of the rank."""
        try:
            sent = pickle.dumps(answer)
        except Exception as problem:  # whatever a user's own pickling raises
            text = f"the result cannot be sent: {error_text(problem)}"
            sent = pickle.dumps(replace(answer, value=None, error=TypeError(text), detail=f"TypeError: {text}"))
        with self._speaking:
            self._pipe.send_bytes(number + sent)

    def _position(self) -> Position:
        frame = sys._current_frames().get(self._main)
        return Position(rank=self._place.rank, state="runs", caller=caller_of(frame))

    def _meeting_point(self) -> Store:
        if self._store is None:
            limit = timedelta(seconds=_MEET_S)
            self._store = TCPStore(self._place.master_addr, self._place.master_port, timeout=limit)
        return self._store
