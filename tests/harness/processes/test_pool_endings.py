"""Nothing of a pool outlives it: closed, dropped, interrupted or killed, no process and no file is left."""

import gc
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest

from shardproof.harness.engines.processes.forked import pool
from shardproof.harness.engines.processes.forked.pool import ForkServer, PoolEngine
from shardproof.harness.errors import RankDied
from tests.forked import Forked, started
from tests.harness.engines.programs import asks_the_store, forever, parent_of, summed, total

SHARED = Path("/dev/shm")


@pytest.fixture(autouse=True)
def one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are forked from one server: a second one would take as long to start."""
    monkeypatch.setattr(pool, "_HASH_SEEDS", (1,))


def family(engine: PoolEngine) -> list[int]:
    """The pids of the fork servers and of the ranks of an engine that has run on two ranks."""
    pids: list[int] = engine.run(own_pid, world_size=2)
    return [*map(parent_of, pids), *pids]


def own_pid(rank: int) -> int:
    return os.getpid()


def ends_its_server(rank: int) -> None:
    if rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    while True:
        time.sleep(1)


def driver(program: Callable[[int], None], file: str) -> None:
    """A driver of a pool that writes down its pool's processes and hangs in a run; an interruption closes the pool."""
    with mock.patch.object(pool, "_HASH_SEEDS", (1,)), PoolEngine() as engine:
        Path(file).write_text(" ".join(map(str, family(engine))))
        engine.run(program, world_size=2, timeout_s=600)


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


def test_a_killed_server_is_replaced_and_dropping_an_engine_ends_every_process() -> None:
    engine = PoolEngine()
    pids = family(engine)
    os.kill(pids[0], signal.SIGKILL)
    assert gone(pids[:1])
    assert engine.run(summed, world_size=2) == [total(2)] * 2
    assert gone(pids), "ranks of a server that has ended are replaced"
    with pytest.raises(
        RankDied, match="^rank 0 of 2 died: its fork server has ended, rank 1 of 2 died: its fork server"
    ):
        engine.run(ends_its_server, world_size=2)
    pids = family(engine)
    del engine
    gc.collect()
    assert gone(pids)


def test_a_worker_whose_driver_ends_before_it_says_what_to_run_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool, "_PRELOADED", ())
    server = ForkServer(1)
    with closing(server):
        server.ensure_running()
        from_worker, to_worker = server.connect_to_new_process([])
        os.close(to_worker)  # as by an interruption, or the end of the time for experiments
        forkserver.read_signed(from_worker)  # its pid
        assert forkserver.read_signed(from_worker) == 1, "its exit status"
        os.close(from_worker)
    assert capfd.readouterr().err == ""


def driven(program: Callable[[int], None], folder: Path) -> tuple[Forked, list[int]]:
    """A driver that has begun its run, and its pool's processes: a server and two ranks."""
    file, temporary = folder / "pids", folder / "temporary"
    temporary.mkdir()
    forked = started(driver, program, str(file), folder=folder, environment={"TMPDIR": str(temporary)})
    until_s = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and forked.process.is_alive() and time.monotonic() < until_s:
        time.sleep(0.05)
    pids = [int(word) for word in file.read_text().split()]
    assert len(set(pids)) == 3
    time.sleep(0.2)
    return forked, pids


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_no_orphan_and_no_file_is_left_when_the_driver_ends(tmp_path: Path, end: signal.Signals) -> None:
    forked, pids = driven(forever, tmp_path)
    everybody, folder = [forked.pid, *pids], tmp_path / "temporary"
    before = files_of(everybody, folder)
    forked.send(end)
    status = forked.ended()
    assert gone(pids)
    assert files_of(everybody, folder) == before == set()
    assert status == -signal.SIGKILL or "KeyboardInterrupt" in forked.err


def test_a_driver_that_is_terminated_in_a_run_ends_without_a_word(tmp_path: Path) -> None:
    """A rank has died, and the other one waits for a key of the driver's store."""
    forked, pids = driven(asks_the_store, tmp_path)
    forked.send(signal.SIGSTOP)  # it hears nothing of what happens now
    os.kill(pids[2], signal.SIGKILL)
    time.sleep(0.8)
    forked.send(signal.SIGTERM)
    forked.send(signal.SIGCONT)
    assert (forked.ended(), forked.err) == (-signal.SIGTERM, "")
    assert gone(pids)
