"""Nothing of a pool outlives it: closed, dropped, interrupted or killed, no process and no file is left."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engines.processes.forked.pool import PoolEngine
from harness.errors import MachineError, RankCrashed, RequestError
from tests import ROOT
from tests.harness.processes.pool_programs import calls_then, family, os_parent, summed, total

SHARED = Path("/dev/shm")


def gone(pids: list[int]) -> bool:
    """Whether these processes end within some seconds."""
    until_s = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() and not _zombie(pid) for pid in pids):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def files_of(pids: list[int], folder: Path) -> set[str]:
    """What lies in the processes' own temporary folder, and in shared memory what names one of them."""
    shared = (path for path in SHARED.iterdir()) if SHARED.exists() else ()
    named = {str(path) for path in shared if {int(n) for n in re.findall(r"\d+", path.name)} & set(pids)}
    return {str(path) for path in folder.iterdir()} | named


def test_closing_and_dropping_end_every_process() -> None:
    engine = PoolEngine()
    pids = family(engine)
    engine.close()
    assert gone(pids)
    with pytest.raises(RequestError, match="the engine is closed"):
        engine.run(summed, world_size=2)
    engine = PoolEngine()
    pids = family(engine)
    del engine
    gc.collect()
    assert gone(pids)


def driven(kind: str, file: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A driver that has begun its run, and its pool's processes: two servers and two ranks."""
    command = [sys.executable, "-m", "tests.harness.processes.pool_driver", kind, str(file)]
    temporary = file.with_name("temporary")
    temporary.mkdir()
    environment = dict(os.environ) | {"TMPDIR": str(temporary)}
    driver = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, env=environment)
    until_s = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and driver.poll() is None and time.monotonic() < until_s:
        time.sleep(0.05)
    pids = [int(word) for word in file.read_text().split()]
    assert len(set(pids)) == 4
    time.sleep(0.2)
    return driver, pids


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("waits", lambda driver: driver.kill()),
        ("waits", lambda driver: driver.send_signal(signal.SIGINT)),
        ("drops", lambda driver: None),
    ],
    ids=["killed", "interrupted", "not-closed"],
)
def test_no_orphan_and_no_file_is_left_when_the_driver_ends(
    tmp_path: Path, kind: str, end: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    driver, pids = driven(kind, tmp_path / "pids")
    everybody, folder = [driver.pid, *pids], tmp_path / "temporary"
    before = files_of(everybody, folder)
    end(driver)
    _, errors = driver.communicate(timeout=30)
    assert gone(pids)
    assert files_of(everybody, folder) == before == set()
    if kind == "waits" and driver.returncode != -signal.SIGKILL:
        assert b"KeyboardInterrupt" in errors


@pytest.mark.parametrize(("kind", "dies"), [("answers", False), ("waits", True), ("asks", False)])
def test_a_driver_that_is_terminated_in_a_run_ends_without_a_word(tmp_path: Path, kind: str, dies: bool) -> None:
    driver, pids = driven(kind, tmp_path / "pids")
    driver.send_signal(signal.SIGSTOP)  # it hears nothing of what happens now
    if dies:
        os.kill(pids[3], signal.SIGKILL)
    time.sleep(0.8)
    driver.terminate()
    driver.send_signal(signal.SIGCONT)
    _, errors = driver.communicate(timeout=30)
    assert (driver.returncode, errors) == (-signal.SIGTERM, b"")
    assert gone(pids)


def test_a_rank_takes_what_it_started_with_it() -> None:
    with PoolEngine() as engine:
        servers = family(engine)[:2]
        with pytest.raises(RankCrashed):
            engine.run(calls_then, "child", world_size=2)
        assert engine.run(summed, world_size=2) == [total(2)] * 2
        sleepers = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _sleeps(p)]
        assert not [pid for pid in sleepers if os_parent(pid) in {1, *servers}]


def _sleeps(process: Path) -> bool:
    try:
        return (process / "cmdline").read_bytes() == b"sleep\x00600\x00"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_fork_server_is_a_machine_error_and_the_next_run_starts_another() -> None:
    with PoolEngine() as engine:
        pids = family(engine)
        os.kill(pids[0], signal.SIGKILL)
        assert gone(pids[::2])
        try:
            results = engine.run(summed, world_size=2)
        except MachineError:
            results = engine.run(summed, world_size=2)
        assert results == [total(2)] * 2
