"""Workers: messages come before the end, the end comes in words, and none outlives its driver."""

import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from shardproof.harness.engines.processes.forked import pool
from shardproof.harness.engines.processes.forked.pool import ForkServer
from shardproof.harness.engines.processes.workers import ProcessEnd, Worker, receive
from shardproof.harness.errors import MachineError
from tests.forked import started
from tests.harness.processes.test_pool_endings import gone

FORK = multiprocessing.get_context("fork")


def say(pipe: Connection, _memory: int, ending: str) -> None:
    """Send a message, then end in some way."""
    pipe.send_bytes(b"said")
    if ending == "crash":
        ctypes.string_at(0)
    if ending == "leave":
        sys.exit(3)
    if ending == "break":
        raise KeyError
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("ending", "end"),
    [
        ("crash", ProcessEnd("killed by SIGSEGV", by_program=True)),
        ("leave", ProcessEnd("its process ended with exit status 3", by_program=True)),
        ("break", ProcessEnd("its process ended with exit status 70")),
        ("kill", ProcessEnd("killed by SIGKILL, as the system does when memory runs out")),
    ],
)
def test_a_message_comes_before_the_end_which_is_told_in_words(ending: str, end: ProcessEnd) -> None:
    worker = Worker(FORK, say, ending)
    came: list[bytes | ProcessEnd] = []
    for _ in range(2):
        came += [message for _, message in receive({worker: "it"}, 10.0)]
    assert came == [b"said", end]
    assert bool(re.fullmatch(r"\S*test_workers\.py:\d+ in say", worker.crashed_at())) is (ending == "crash")
    worker.close()


def prepares(pipe: Connection, _memory: int) -> None:
    pipe.send(spawn.get_preparation_data.__module__)


def test_a_forked_worker_starts_processes_as_python_does() -> None:
    worker = Worker(FORK, prepares)
    assert worker.pipe.recv() == "multiprocessing.spawn"
    worker.close(5.0)
    assert worker.process.exitcode == 0


def is_busy(pipe: Connection, _memory: int) -> None:
    """Start a process, then be where no handler of Python runs."""
    pipe.send(subprocess.Popen(["sleep", "600"]).pid)
    ctypes.PyDLL(None).pause()  # with the interpreter's lock


def drive(file: str) -> None:
    worker = Worker(FORK, is_busy, leads=True)
    Path(file).write_text(f"{worker.pid} {worker.pipe.recv()}")
    time.sleep(60)


def test_a_worker_amid_native_code_ends_with_its_driver_and_takes_along_what_it_started(tmp_path: Path) -> None:
    driver = started(drive, str(tmp_path / "pids"), folder=tmp_path)
    until_s = time.monotonic() + 30
    while not ((tmp_path / "pids").exists() and (tmp_path / "pids").read_text()) and time.monotonic() < until_s:
        time.sleep(0.02)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert not any(map(has_gone, pids))
    driver.send(signal.SIGKILL)
    driver.ended()
    assert gone(pids)


def has_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_fork_server_that_cannot_start_is_the_machines_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "boot", lambda: "raise SystemExit\n")
    server = ForkServer(1)
    with pytest.raises(
        MachineError, match="^the fork server of the pool failed: it has ended; its messages are on std"
    ):
        server.start(say)
    server.close()
