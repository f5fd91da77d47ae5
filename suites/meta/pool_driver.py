"""A driver of a pool that comes to no good end:  python -m suites.meta.pool_driver waits FILE | drops FILE.

Writes the pids of the pool's processes to FILE, then hangs in a run, or ends without closing the engine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness.engines.pool import PoolEngine
from suites.meta.pool_programs import family, forever

__all__ = ["main"]


def main(kind: str, file: str) -> None:
    """Be that driver."""
    engine = PoolEngine()
    Path(file).write_text(" ".join(map(str, family(engine))))
    if kind == "waits":
        engine.run(forever, world_size=2, timeout_s=600)


if __name__ == "__main__":
    main(*sys.argv[1:])
