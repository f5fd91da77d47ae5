"""How long, in seconds, threads of this process wait for a processor, which is not the program's fault.

On a busy machine time limits are extended by these seconds. Waiting for a lock or a queue does not count.
Source: /proc/<pid>/task/<tid>/schedstat of Linux; elsewhere nothing is known, and no limit is extended.
"""

import threading
import time
from collections.abc import Collection
from pathlib import Path

from shardproof.harness.interpreter import turns_of_threads

LONGEST = 10
"""How many times its limit a run may take, including the time in which ranks compile or wait for a processor."""
LOOKING_S = 1e-4
"""While threads are looked at, a thread that computes releases the interpreter after so many seconds."""
_TASKS = Path("/proc/self/task")


class Starvation:
    """How long threads have waited for a processor since this was made; those with identities in `but` do not count."""

    def __init__(self, but: Collection[int] = ()) -> None:
        self._but = frozenset(map(str, but))
        self._waits_ns = self._read()
        self._since_s, self._used_s = time.monotonic(), time.process_time()
        self._looked_s = self._since_s
        self.lost_s = 0.0

    def look(self) -> float:
        """Seconds lost since the last look, at most the time that has passed since then."""
        seen, now_s = self._read(), time.monotonic()
        waited_ns = sum(max(waits - self._waits_ns.get(thread, 0), 0) for thread, waits in seen.items())
        lost_s = min(waited_ns / 1e9, now_s - self._looked_s)
        self._waits_ns, self._looked_s = seen, now_s
        self.lost_s += lost_s
        return lost_s

    def own_seconds(self, longest: float) -> float:
        """Seconds since this was made but for those that were lost; at least 1 / `longest` of all."""
        self.look()
        passed_s = time.monotonic() - self._since_s
        return max(passed_s - self.lost_s, passed_s / longest)

    @property
    def words(self) -> str:
        """A note on a busy machine; "" if less than a fifth of the time was lost."""
        self.look()
        passed_s = time.monotonic() - self._since_s
        if self.lost_s < passed_s / 5:
            return ""
        used = f"{time.process_time() - self._used_s:.3g} s of processor time in {passed_s:.3g} s"
        return f"the process had {used} and waited for a processor for {self.lost_s:.3g} s of them: the machine is busy"

    def _read(self) -> dict[str, int]:
        """Thread -> for how many nanoseconds it was ready to run and waited."""
        found = {}
        with turns_of_threads(LOOKING_S):
            for thread in _TASKS.iterdir() if _TASKS.is_dir() else ():
                try:
                    if thread.name not in self._but:
                        found[thread.name] = int((thread / "schedstat").read_bytes().split()[1])
                except (OSError, IndexError):  # it has ended
                    continue
        return found


def own_thread() -> tuple[int]:
    """The identity of the calling thread in the system."""
    return (threading.get_native_id(),)
