"""Time on a device: CUDA events in its streams, where the host's clock would give the time at which work was enqueued.

Recording an event waits for nothing, so the program's streams run as they would; what lies between the two events of a
call is what the call took on the device, its wait for the other ranks included. Read when the program is over.
Microseconds. Source: torch.cuda.Event; its resolution is half a microsecond.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in a stream: torch.cuda.Event, made with enable_timing."""

    def record(self) -> object:
        """The current stream passes here."""
        ...

    def synchronize(self) -> object:
        """Wait until it has passed."""
        ...

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds from this mark to a later one."""
        ...


class Stopwatch:
    """Marks streams, and returns where marks lie on the host's clock, time.perf_counter, from its own making on."""

    def __init__(self, make: Callable[[], Mark], synchronize: Callable[[], object]) -> None:
        self._make = make
        synchronize()  # an idle device passes the first mark at once: here both clocks meet
        self._origin = self.mark()
        self._origin_s = time.perf_counter()

    def mark(self) -> Mark:
        """A mark in the current stream of this thread."""
        made = self._make()
        made.record()
        return made

    def us(self, first: Mark, last: Mark) -> float:
        """From one mark to the other; waits until both have passed."""
        for one in (first, last):
            one.synchronize()
        return first.elapsed_time(last) * 1e3

    def host_s(self, mark: Mark) -> float:
        """When the mark was passed, on the host's clock."""
        return self._origin_s + self.us(self._origin, mark) / 1e6


def stopwatch(device: str | torch.device) -> Stopwatch | None:
    """The stopwatch of a device, None where the host's clock is true: on a CPU, and on meta tensors."""
    on = torch.device(device)
    if on.type != "cuda":
        return None
    return Stopwatch(lambda: torch.cuda.Event(enable_timing=True), lambda: torch.cuda.synchronize(on))
