"""The worker's side of the pool: orders and reports over a socket, groups that stay connected from run to run."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import PrefixStore, TCPStore

from harness.engines.processes.flight_recorder import FlightRecorder
from harness.engines.processes.forked import stacks
from harness.engines.processes.forked.cpu_affinity import CpuAffinity
from harness.engines.processes.forked.framing import receive, send
from harness.engines.processes.forked.kept_groups import KeptGroups
from harness.engines.processes.messages import RunOrder, WorkerReport, packed_report, unpacked
from harness.engines.processes.rank_program import world
from harness.engines.processes.worker import work

HOST = "127.0.0.1"
_FOREVER_S = 86400.0
"""torch's own limit of a wait: the supervisor's comes first, and a rank that gave up by itself would hide the cause."""
_STORE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedOrder:
    """A run in the driver's working folder and with its import path, over the store at `port`.

    `connection` changes when the processes of a run do: groups connected under another one are of no use.
    """

    run: RunOrder
    connection: int
    port: int
    folder: str
    path: tuple[str, ...]


def serve(sock: socket.socket, recorder_file: int) -> None:
    """The life of a worker that was forked with this socket and the file of its flight recorder."""
    stacks.print_on_signal(recorder_file)
    try:
        work(_Link(sock, FlightRecorder(recorder_file)))
    except (EOFError, ConnectionError):  # the driver has closed the socket: this worker is not needed any more
        return


class _Link:
    """The socket, and what stays from run to run: the connection to the store, the kept groups."""

    def __init__(self, sock: socket.socket, recorder: FlightRecorder) -> None:
        self.recorder = recorder
        self._sock = sock
        self._kept = KeptGroups(recorder.makes_group)
        self._affinity = CpuAffinity()
        self._store: Any = None
        self._connection = self._port = 0

    def orders(self) -> Iterator[RunOrder]:
        """The runs; raises EOFError or ConnectionError when the driver closes the socket."""
        while True:
            order: ForkedOrder | None = unpacked(receive(self._sock))
            if order is not None:
                sys.path[:] = order.path
                os.chdir(order.folder)
                if order.port != self._port:
                    self._store, self._port = None, order.port
                self._connection = order.connection
                self.recorder.begin(order.run.number)
                yield order.run

    @contextmanager
    def world(self, order: RunOrder) -> Iterator[None]:
        """This rank's world; its groups are those kept from earlier runs, where they are the same."""
        if self._store is None:
            self._store = TCPStore(HOST, self._port, is_master=False, timeout=timedelta(seconds=_STORE_S))
        store = PrefixStore(order.store_prefix, self._store)
        self._affinity.take(order.rank, order.world_size)
        with self._kept.used(self._connection), world(order.rank, order.world_size, store, _FOREVER_S):
            yield

    def report(self, report: WorkerReport) -> None:
        """Send how the run ended; end the process where the driver is gone."""
        report = replace(report, kept_groups=len(self._kept), reusable=threading.active_count() == 1)
        try:
            send(self._sock, packed_report(report))
        except ConnectionError:
            _vanish()

    def wait_for_release(self) -> None:
        """Return when the driver reports that all ranks have ended."""
        try:
            receive(self._sock)
        except (EOFError, ConnectionError):
            _vanish()


def _vanish() -> NoReturn:
    """End at once: the driver is gone in the middle of a run, and torch, taking its world down, would print at length
    that the store is gone too.
    """
    os._exit(0)
