"""The child process that is one rank of a launched world: it runs what it is ordered to, and says where it stands.

Programs run in the main thread, as a user's own script would; a second thread reads the orders, so that a rank that is
stuck can still be asked. What it issues is written down (flight_recorder) and told with every answer. The child
ends when its parent does. Times are seconds.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue

from torch.distributed import PrefixStore, Store, TCPStore

from harness.callers import caller_of
from harness.engines.interposer import Interposer
from harness.engines.processes.exit_status import OUR_STATUS
from harness.engines.processes.flight_recorder import Fact, Reader, Writer, anonymous_file
from harness.engines.processes.launched.agent import LEAVE, RUN, WHERE
from harness.engines.processes.launched.environment import Launched
from harness.engines.processes.rank_program import Ended, ended, seeded, world
from harness.engines.processes.trace_matcher import WAITING_IN
from harness.errors import error_text

__all__ = ["NUMBER_BYTES", "Answer", "Order", "live"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a rank ended, or where it stands while `ended` is None; and the calls it has issued since it last told.

    `refused`: why the program could not be read; `broken`: why there was no world to run it in. `inside`: whether the
    last call is not known to be complete, `waits`: 1 + the place of the asynchronous call that is waited for;
    `in_wait`: whether the main thread stands where one waits. `unwaited`: the places of those never waited for.
    """

    ended: Ended | None = None
    refused: str = ""
    broken: str = ""
    calls: tuple[tuple[float, Fact], ...] = ()
    inside: bool = False
    waits: int = 0
    in_wait: bool = False
    unwaited: tuple[int, ...] = ()
    caller: str = ""


def live(pipe: Connection, place: Launched) -> None:
    """The child's life: what the process is started with."""
    os.setpgid(0, 0)  # signals to the launched processes, Ctrl-C among them, are theirs: rank 0 decides what follows
    warnings.filterwarnings("ignore", "Work::result API is being deprecated")  # by those who follow works: us
    life = _Life(pipe, place)
    threading.Thread(target=life.listen, name="orders", daemon=True).start()
    try:
        life.serve()
    except Exception:  # a bug of ours, which must not look like one of the program's
        traceback.print_exc()
        os._exit(OUR_STATUS)


class _Life:
    """The orders that came in, what was written down, and what goes out."""

    def __init__(self, pipe: Connection, place: Launched) -> None:
        self._pipe = pipe
        self._place = place
        self._orders: SimpleQueue[bytes] = SimpleQueue()
        self._speaking = threading.Lock()
        self._main = threading.get_ident()
        self._store: Store | None = None
        board = anonymous_file()
        self._writer, self._reader = Writer(board), Reader(board)
        self._number = b""

    def listen(self) -> None:
        """Read orders until the parent is gone; then end at once, for the main thread may wait in native code."""
        try:
            while True:
                order = self._pipe.recv_bytes()
                if order[:1] in {RUN, LEAVE}:
                    self._orders.put(order)
                else:
                    self._say(order[1:], self._where() if order[:1] == WHERE else Answer())
        except (EOFError, OSError):
            os._exit(3)

    def serve(self) -> None:
        """Run what comes in, one after another."""
        with Interposer(log=self._writer) as interposer:
            while True:
                order = self._orders.get()
                if order[:1] == RUN:
                    self._run(pickle.loads(order[1:]), interposer)

    def _run(self, order: Order, interposer: Interposer) -> None:
        """Run the program in a world of its own, answer, and leave that world when all ranks may."""
        number = order.number.to_bytes(NUMBER_BYTES, "big")
        with self._speaking:
            self._number = number
            self._writer.begin(order.number)
            self._reader.begin(order.number)
        try:
            program, args = pickle.loads(order.program)
        except Exception as problem:  # whatever importing a user's module raises
            self._say(number, Answer(refused=error_text(problem)))
            return
        interposer.look_for_more()
        rank, answered = self._place.rank, False
        try:
            store = PrefixStore(order.prefix, self._meeting_point())
            with world(rank, order.world_size, store, order.timeout_s, self._place.local_rank):
                seeded(order.seed)
                found = ended(rank, program, args)
                self._say(number, Answer(ended=found, unwaited=self._writer.waits.unwaited()))
                del found, program, args
                answered = True
                while self._orders.get()[:1] != LEAVE:
                    continue
        except (RuntimeError, ValueError) as problem:
            if not answered:
                self._say(number, Answer(broken=error_text(problem)))

    def _say(self, number: bytes, answer: Answer) -> None:
        """Send an answer of this run, with what was written down since the last one."""
        with self._speaking:
            if number == self._number:
                calls, inside, waits = tuple(self._reader.new()), self._reader.inside(), self._reader.waits()
                answer = replace(answer, calls=calls, inside=inside, waits=waits)
            self._pipe.send_bytes(number + _packed(answer))

    def _where(self) -> Answer:
        frame = sys._current_frames().get(self._main)
        in_wait = frame is not None and frame.f_code.co_filename.endswith(WAITING_IN)
        return Answer(caller=caller_of(frame), in_wait=in_wait)

    def _meeting_point(self) -> Store:
        if self._store is None:
            limit = timedelta(seconds=_MEET_S)
            self._store = TCPStore(self._place.master_addr, self._place.master_port, timeout=limit)
        return self._store


def _packed(answer: Answer) -> bytes:
    """The answer as bytes; a value that cannot be pickled is told as the error of its rank."""
    try:
        return pickle.dumps(answer)
    except Exception as problem:  # whatever a user's own pickling raises
        text = f"the result cannot be sent from the rank's process: {error_text(problem)}"
        return pickle.dumps(replace(answer, ended=None, refused=text))
