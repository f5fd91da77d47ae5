"""The processors of a rank's process when ranks are more than processors: one of them, for all its threads.

A call on gloo wakes several threads of a rank one after another. On processors that are shared anyway, a wake-up on the
processor that is awake costs half of one across: four ranks on two cores make twice as many calls a second. Where every
rank has a processor for itself, threads stay free. What a rank starts (threads, processes) inherits its processors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress


def share(processors: Iterable[int], rank: int, world_size: int) -> frozenset[int]:
    """The processors of a rank: one of them when they are not more than the ranks, else all."""
    known = sorted(processors)
    return frozenset(known) if len(known) > world_size else frozenset({known[rank % len(known)]})


class CpuAffinity:
    """The processors on which this process runs; it may use those that it started with."""

    def __init__(self) -> None:
        self._processors = frozenset(os.sched_getaffinity(0)) if sys.platform == "linux" else frozenset()
        self._now = self._processors

    def take(self, rank: int, world_size: int) -> None:
        """Run as this rank of `world_size`, where the system lets a process choose."""
        if sys.platform != "linux":
            return
        wanted = share(self._processors, rank, world_size)
        if wanted != self._now:
            self._now = wanted
            for thread in os.listdir("/proc/self/task"):
                with suppress(OSError):  # the thread has ended, or a processor was taken from this process meanwhile
                    os.sched_setaffinity(int(thread), wanted)
