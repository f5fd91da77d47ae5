"""A driver of a pool that comes to no good end, in a process that a test starts.

The pids of the pool's processes are written to a file. Then the driver hangs in a run (`waits`, or `asks`: for the
store).
"""

import os
from pathlib import Path
from unittest import mock

from harness.engines.processes.forked import pool
from harness.engines.processes.forked.pool import PoolEngine
from tests.harness.engines.programs import asks_the_store, forever, parent_of


def family(engine: PoolEngine) -> list[int]:
    """The pids of the fork servers and of the ranks of an engine that has run on two ranks."""
    pids: list[int] = engine.run(_pid, world_size=2)
    return [*map(parent_of, pids), *pids]


def _pid(rank: int) -> int:
    return os.getpid()


def main(kind: str, file: str) -> None:
    """Be that driver, of a pool whose ranks are all forked from one server: another is as long in coming."""
    with mock.patch.object(pool, "_HASH_SEEDS", (1,)):
        engine = PoolEngine()
        Path(file).write_text(" ".join(map(str, family(engine))))
        engine.run(asks_the_store if kind == "asks" else forever, world_size=2, timeout_s=600)
