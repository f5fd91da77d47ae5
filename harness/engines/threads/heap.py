"""The C library's allocator, where ranks are threads: one arena for all, and freed memory returned between runs.

With one arena, memory that one rank has freed is warm for the next. The setting holds for all threads born later in
this process. They lose nothing but speed, and only if many allocate at a time. But cases of many shapes leave such an
arena full of holes. A process that proves thousands of them would keep a gigabyte for a third of one in use. Both are
glibc's; elsewhere nothing is done. Bytes.
"""

import ctypes
import os
from pathlib import Path

_C = ctypes.CDLL(None)
_M_ARENA_MAX = -8
"""mallopt's word in malloc.h."""
_SLACK_BYTES = 2**28
"""Memory that may be kept for reuse, so that runs do not return and fetch again what each of them needs."""
_EVERY = 16
"""Runs between two looks."""
_STATM = Path("/proc/self/statm")


class Heap:
    """Memory of this process; looked at once in several runs, for a system call between two small ones shows."""

    def __init__(self, slack_bytes: int = _SLACK_BYTES, every: int = _EVERY) -> None:
        self._slack_bytes = slack_bytes
        self._every = every
        self._runs = 0
        self._needed_bytes = resident_bytes()

    def settle(self) -> None:
        """A run is over: return freed memory if the process grew by more than the slack since that was done last."""
        self._runs += 1
        if self._runs % self._every:
            return
        if resident_bytes() - self._needed_bytes > self._slack_bytes and (trim := getattr(_C, "malloc_trim", None)):
            trim(0)
            self._needed_bytes = resident_bytes()


def resident_bytes() -> int:
    """This process's memory in use, as Linux counts it; 0 where the system does not count it."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def share_one_arena() -> None:
    """glibc gives every new thread an arena of its own; ranks that take turns do better with one."""
    if mallopt := getattr(_C, "mallopt", None):
        mallopt(_M_ARENA_MAX, 1)
