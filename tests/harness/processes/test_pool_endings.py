"""Nothing of a pool outlives it: closed, dropped, interrupted or killed, no process and no file is left."""

import gc
import os
import re
import signal
import time
from pathlib import Path

import pytest

from harness.engines.processes.forked import pool
from harness.engines.processes.forked.pool import PoolEngine
from harness.errors import MachineError, RequestError
from tests.forked import Forked, started
from tests.harness.engines.programs import summed, total
from tests.harness.processes.pool_driver import family, main

SHARED = Path("/dev/shm")


@pytest.fixture(autouse=True)
def one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are forked from one server: another is as long in coming."""
    monkeypatch.setattr(pool, "_HASH_SEEDS", (1,))


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
    """Files in the processes' own temporary folder, and files in shared memory that name one of them."""
    shared = (path for path in SHARED.iterdir()) if SHARED.exists() else ()
    named = {str(path) for path in shared if {int(n) for n in re.findall(r"\d+", path.name)} & set(pids)}
    return {str(path) for path in folder.iterdir()} | named


def test_closing_and_dropping_end_every_process_and_a_killed_server_is_replaced() -> None:
    engine = PoolEngine()
    pids = family(engine)
    os.kill(pids[0], signal.SIGKILL)
    assert gone(pids)
    try:
        results = engine.run(summed, world_size=2)
    except MachineError:
        results = engine.run(summed, world_size=2)
    assert results == [total(2)] * 2
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


def driven(kind: str, folder: Path) -> tuple[Forked, list[int]]:
    """A driver that has begun its run, and its pool's processes: a server and two ranks."""
    file, temporary = folder / "pids", folder / "temporary"
    temporary.mkdir()
    driver = started(main, kind, str(file), folder=folder, environment={"TMPDIR": str(temporary)})
    until_s = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and driver.process.is_alive() and time.monotonic() < until_s:
        time.sleep(0.05)
    pids = [int(word) for word in file.read_text().split()]
    assert len(set(pids)) == 3
    time.sleep(0.2)
    return driver, pids


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_no_orphan_and_no_file_is_left_when_the_driver_ends(tmp_path: Path, end: signal.Signals) -> None:
    driver, pids = driven("waits", tmp_path)
    everybody, folder = [driver.pid, *pids], tmp_path / "temporary"
    before = files_of(everybody, folder)
    driver.send(end)
    status = driver.ended()
    assert gone(pids)
    assert files_of(everybody, folder) == before == set()
    assert status == -signal.SIGKILL or "KeyboardInterrupt" in driver.err


@pytest.mark.parametrize(("kind", "dies"), [("waits", True), ("asks", False)])
def test_a_driver_that_is_terminated_in_a_run_ends_without_a_word(tmp_path: Path, kind: str, dies: bool) -> None:
    driver, pids = driven(kind, tmp_path)
    driver.send(signal.SIGSTOP)  # it hears nothing of what happens now
    if dies:
        os.kill(pids[2], signal.SIGKILL)
    time.sleep(0.8)
    driver.send(signal.SIGTERM)
    driver.send(signal.SIGCONT)
    assert (driver.ended(), driver.err) == (-signal.SIGTERM, "")
    assert gone(pids)
