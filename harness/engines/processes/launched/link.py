"""The worker's side of a launched world: a child process of the launched one, connected to the driver by its agent.

Programs run in the main thread, as a user's own script would; a second thread reads the orders, so that a rank that is
stuck still answers where it stands. Calls are recorded in this process (flight_recorder) and sent with every answer.
The child ends when its parent does. Times are seconds.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import NamedTuple

from torch.distributed import PrefixStore, Store, TCPStore

from harness.engines.calls.callers import caller_of
from harness.engines.processes.exit_status import OUR_STATUS
from harness.engines.processes.flight_recorder import FlightRecorder, RecordedCall, Recording, anonymous_file
from harness.engines.processes.launched.agent import LEAVE, RUN, WHERE
from harness.engines.processes.launched.environment import Launched
from harness.engines.processes.messages import RunOrder, Standing, WorkerReport, packed, packed_report, unpacked
from harness.engines.processes.rank_program import world
from harness.engines.processes.waits import is_waiting
from harness.engines.processes.worker import work

NUMBER_BYTES = 8
"""An answer begins with the number of its run."""
_STORE_S = 30.0
"""How long the store may take to answer."""


class Progress(NamedTuple):
    """How far a rank has come: the calls it recorded since its last answer, and where it stands.

    `inside` and `waits` are those of a Recording, `standing` is where the main thread is. `report`: the packed report
    of a run that has ended, else empty.
    """

    calls: tuple[tuple[float, RecordedCall], ...] = ()
    inside: bool = False
    waits: int = 0
    standing: Standing = Standing()
    report: bytes = b""


def live(pipe: Connection, place: Launched) -> None:
    """The life of the child: the target with which its process is started."""
    os.setpgid(0, 0)  # signals to the launched processes, Ctrl-C among them, are theirs: rank 0 decides what follows
    warnings.filterwarnings("ignore", "Work::result API is being deprecated")  # raised by our own FollowedWork
    link = _Link(pipe, place)
    threading.Thread(target=link.listen, name="orders", daemon=True).start()
    try:
        work(link)
    except Exception:  # a bug of this package, which must not look like one of the program's
        traceback.print_exc()
        os._exit(OUR_STATUS)


class _Link:
    """The pipe to the agent, the orders that came in, and the flight recorder with its reader."""

    def __init__(self, pipe: Connection, place: Launched) -> None:
        self._pipe = pipe
        self._place = place
        self._orders: SimpleQueue[bytes] = SimpleQueue()
        self._sending = threading.Lock()
        self._main = threading.get_ident()
        self._store: Store | None = None
        file = anonymous_file()
        self.recorder, self._recording = FlightRecorder(file), Recording(file)
        self._number = b""

    def listen(self) -> None:
        """Read orders until the parent is gone; then end at once, for the main thread may wait in native code."""
        try:
            while True:
                order = self._pipe.recv_bytes()
                if order[:1] in {RUN, LEAVE}:
                    self._orders.put(order)
                else:
                    self._answer(order[1:], Progress(standing=self._standing() if order[:1] == WHERE else Standing()))
        except (EOFError, OSError):
            os._exit(3)

    def orders(self) -> Iterator[RunOrder]:
        """The runs; the process ends with its parent."""
        while True:
            message = self._orders.get()
            if message[:1] == RUN:
                order: RunOrder = unpacked(message[1:])
                with self._sending:
                    self._number = order.number.to_bytes(NUMBER_BYTES, "big")
                    self.recorder.begin(order.number)
                    self._recording.begin(order.number)
                yield order

    @contextmanager
    def world(self, order: RunOrder) -> Iterator[None]:
        """This rank's world, over the launcher's store."""
        if self._store is None:
            limit = timedelta(seconds=_STORE_S)
            self._store = TCPStore(self._place.master_addr, self._place.master_port, timeout=limit)
        store = PrefixStore(order.store_prefix, self._store)
        with world(order.rank, order.world_size, store, order.timeout_s, self._place.local_rank):
            yield

    def report(self, report: WorkerReport) -> None:
        """Send how the run ended."""
        self._answer(report.number.to_bytes(NUMBER_BYTES, "big"), Progress(report=packed_report(report)))

    def wait_for_release(self) -> None:
        """Return when the driver reports that all ranks have ended."""
        while self._orders.get()[:1] != LEAVE:
            continue

    def _answer(self, number: bytes, progress: Progress) -> None:
        """Send an answer of this run, with the calls recorded since the last one."""
        with self._sending:
            if number == self._number:
                calls, recording = tuple(self._recording.new()), self._recording
                progress = progress._replace(calls=calls, inside=recording.inside(), waits=recording.waits())
            self._pipe.send_bytes(number + packed(progress))

    def _standing(self) -> Standing:
        frame = sys._current_frames().get(self._main)
        return Standing(frame is not None and is_waiting(frame.f_code.co_filename), caller_of(frame))
