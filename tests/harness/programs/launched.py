"""Scripts as a launcher starts them, recorded or not: one process a rank, with torchrun's environment.

`started` starts Python anew, as a launcher does; `forked` forks processes that have imported torch, which saves some
seconds of a processor a rank, and arms the recorder as the hook does (harness.programs.hook).
"""

from __future__ import annotations

import argparse
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

import tests.forked
from harness.programs.launch import add_options, request_of
from harness.programs.session import VARIABLE, arm, new_session
from tests import ROOT

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


def forked(
    folder: Path, script: str, *words: str, world: int = 2, record: Sequence[str] | None = None
) -> list[tests.forked.Forked]:
    """The same in forked processes, which are running when this returns."""
    text = ""
    if record is not None:
        parser = argparse.ArgumentParser()
        add_options(parser)
        options = request_of(parser.parse_args(record), wraps=False)
        text = new_session(str(folder / "runs"), Path(script).stem, [script, *words], options).text
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world)}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return [
        tests.forked.started(_rank, script, words, text, folder=folder, environment={**meeting, **place})
        for place in places
    ]


def _rank(script: str, words: Sequence[str], session: str) -> int:
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path.cwd()))
    if session:
        os.environ[VARIABLE] = session
        arm(distributed_c10d)
        dist.init_process_group = distributed_c10d.init_process_group  # torch.distributed was imported before
    runpy.run_path(script, run_name="__main__")
    return 0
