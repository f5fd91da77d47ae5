"""The worker: the life of the process that is one rank, run after run, each in a world of its own.

A run is reported as soon as the program has ended; its groups stay until the driver releases the rank, when all ranks
have ended: closing connections earlier would fail ranks that are still reading.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from harness.engines.interposer import Interposer
from harness.engines.processes.flight_recorder import FlightRecorder
from harness.engines.processes.messages import RunOrder, WorkerReport, unpacked
from harness.engines.processes.rank_program import result_of, seed_streams
from harness.errors import error_text
from harness.torch_internals.modes import not_deterministic


class WorkerLink(Protocol):
    """A worker's connection to its driver, and the flight recorder that the driver reads."""

    @property
    def recorder(self) -> FlightRecorder:
        """Records the calls of the current run."""
        ...

    def orders(self) -> Iterator[RunOrder]:
        """The runs, one after another; ends when the driver needs this worker no more."""
        ...

    def world(self, order: RunOrder) -> AbstractContextManager[None]:
        """torch.distributed initialised as the order's rank. Raises RuntimeError or ValueError when it cannot be."""
        ...

    def report(self, report: WorkerReport) -> None:
        """Send how the run ended."""
        ...

    def wait_for_release(self) -> None:
        """Return when every rank has ended."""
        ...


def work(link: WorkerLink) -> None:
    """Run what comes over the link until it ends."""
    with Interposer(log=link.recorder) as interposer:
        for order in link.orders():
            _run(order, link, interposer)


def _run(order: RunOrder, link: WorkerLink, interposer: Interposer) -> None:
    """Run the program in a world of its own, report, and leave that world when all ranks may."""
    imported, number = len(sys.modules), order.number
    try:
        program, args = unpacked(order.program)
    except Exception as problem:  # whatever importing a user's module raises
        link.report(WorkerReport(number=number, refused=error_text(problem)))
        return
    if len(sys.modules) != imported:
        interposer.add_operators()
    reported = False
    try:
        with link.world(order):
            seed_streams(order.seed)
            result = result_of(program, args, order.rank)
            _restore_switches()
            reported = True
            link.report(WorkerReport(number=number, result=result, unwaited=link.recorder.waits.unwaited()))
            del program, args, result
            link.wait_for_release()
    except (RuntimeError, ValueError) as problem:
        if not reported:
            link.report(WorkerReport(number=number, broken=error_text(problem)))


def _restore_switches() -> None:
    """Reset the switches of torch that a program may have left changed."""
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    not_deterministic()
