"""The workers of one run in the pool, as the supervisor sees them: sockets, shared flight recorders, fork servers."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Mapping, Sequence

from harness.engines.processes.exit_status import ProcessEnd, process_end
from harness.engines.processes.flight_recorder import Recording
from harness.engines.processes.forked import stacks
from harness.engines.processes.forked.fork_client import ForkServer, PoolWorker
from harness.engines.processes.forked.framing import send
from harness.engines.processes.forked.link import ForkedOrder
from harness.engines.processes.messages import Standing, WorkerReport, packed, unpacked

_BURIAL_S = 2.0
"""How long a fork server may take, on a busy machine, to report how a process ended that has closed its socket."""
_ANSWER_S = 0.5


class ForkedWorkers:
    """A supervisor.Workers: some processes and their orders, by rank."""

    look_s = 0.05
    settle_s = 0.3
    one_clock = True
    terminated = ""

    def __init__(self, processes: Sequence[PoolWorker], orders: Sequence[ForkedOrder]) -> None:
        self._processes = processes
        self._orders = orders
        self.reports: list[WorkerReport | None] = [None] * len(processes)
        self._selector = selectors.DefaultSelector()
        for rank, process in enumerate(processes):
            process.recording.begin(orders[rank].run.number)
            self._selector.register(process.frames, selectors.EVENT_READ, rank)
        for server in {process.server for process in processes}:
            self._selector.register(server.sock, selectors.EVENT_READ, server)

    @property
    def calls(self) -> list[Recording]:
        """The flight recorders, in memory shared with the processes."""
        return [process.recording for process in self._processes]

    @property
    def died(self) -> Mapping[int, ProcessEnd]:
        """How processes ended whose sockets have closed."""
        return {rank: _end_of(process) for rank, process in enumerate(self._processes) if process.frames.ended}

    def start(self) -> bool:
        """Send every process its order."""
        for process, order in zip(self._processes, self._orders, strict=True):
            self._send(process, packed(order), order.run.timeout_s)
        return True

    def listen(self, limit_s: float) -> None:
        """Take in reports and deaths. Raises MachineError when a fork server has ended."""
        for key, _ in self._selector.select(limit_s):
            if isinstance(key.data, ForkServer):
                key.data.listen(_ANSWER_S)
                continue
            frames = self._processes[key.data].frames
            for message in frames.arrived():
                report: WorkerReport = unpacked(message)
                if report.number == self._orders[key.data].run.number:
                    self.reports[key.data] = report
            if frames.ended:
                self._selector.unregister(frames)

    def refresh(self) -> None:
        """Nothing to do: the memory is shared."""

    def locate(self) -> Mapping[int, Standing]:
        """The stacks of the ranks, which their processes print on a signal."""
        died = self.died
        ranks = [rank for rank, report in enumerate(self.reports) if report is None and rank not in died]
        processes = [self._processes[rank] for rank in ranks]
        pending = [(process.pid, process.recorder_file, process.recording.thread()) for process in processes]
        return dict(zip(ranks, stacks.standings(pending, _ANSWER_S), strict=True))

    def await_ends(self) -> None:
        """Wait until the fork servers have reported how every process ended that is gone."""
        end_s = time.monotonic() + _BURIAL_S
        lost = [process for process in self._processes if process.frames.ended]
        while not all(process.pid in process.server.died for process in lost) and time.monotonic() < end_s:
            self.listen(self.look_s)

    def release(self, *, failed: bool) -> None:
        """Let the ranks leave their worlds; those of a failed run are killed by the pool."""
        if not failed:
            for process, order in zip(self._processes, self._orders, strict=True):
                self._send(process, packed(None), order.run.timeout_s)

    def close(self) -> None:
        """Release the selector; the processes are the pool's."""
        self._selector.close()

    @staticmethod
    def _send(process: PoolWorker, message: bytes, limit_s: float) -> None:
        """Send a message. A process that cannot receive it shows as dead or silent to `listen`."""
        sock = process.frames.sock
        sock.settimeout(limit_s)
        try:
            send(sock, message)
        except OSError:
            return
        finally:
            sock.settimeout(None)


def _end_of(process: PoolWorker) -> ProcessEnd:
    status = process.server.died.get(process.pid)
    return ProcessEnd("its process is gone") if status is None else process_end(os.waitstatus_to_exitcode(status))
