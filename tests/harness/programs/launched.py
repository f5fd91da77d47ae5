"""Scripts as a launcher starts them: one Python process a rank, with torchrun's environment, recorded or not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import ROOT

__all__ = ["LIMIT_S", "environment", "free_port", "ranks_of", "started"]

LIMIT_S = 240.0


def environment(folder: Path, **words: str) -> dict[str, str]:
    """An environment in which our packages are found and no launcher is."""
    kept = {name: value for name, value in os.environ.items() if name in {"PATH", "HOME", "LANG", "LD_LIBRARY_PATH"}}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **words}


def free_port() -> str:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def ranks_of(
    folder: Path, script: str, *words: str, world: int = 2, record: list[str] | None = None, **more: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script of `folder` on every rank to its end; with `record` through `-m shardproof.record` with those words.

    Raises TimeoutExpired, having killed all ranks.
    """
    with started(folder, script, *words, world=world, record=record, **more) as processes:
        ended = []
        for process in processes:
            out, err = process.communicate(timeout=LIMIT_S)
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        return ended


@contextmanager
def started(
    folder: Path, script: str, *words: str, world: int = 2, record: list[str] | None = None, **more: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """The same while the ranks run; they are killed at the end."""
    port = free_port()
    program = [sys.executable, *([] if record is None else ["-m", "shardproof.record", *record]), script, *words]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": port}
    processes = [
        subprocess.Popen(
            program,
            cwd=folder,
            env=environment(folder, **meeting, RANK=str(rank), LOCAL_RANK=str(rank), **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
