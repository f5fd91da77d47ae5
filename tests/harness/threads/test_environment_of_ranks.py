"""The environment of launchers on every engine: each rank reads its own words, and changes stay its own."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import get_node_local_rank

from harness.engines.processes.forked.pool import PoolEngine
from harness.engines.shapes.dry import DryEngine
from harness.engines.threads.concurrent import ConcurrentEngine
from harness.engines.threads.inproc import InprocEngine

RANKS = 3
THREADS = (InprocEngine, ConcurrentEngine)


def words(rank: int) -> list[Any]:
    """What libraries ask a launcher's environment for, torch's own function among them."""
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    dist.barrier()
    return [os.environ.get(name) for name in names] + [
        os.getenv("RANK"),
        dict(os.environ)["RANK"],
        get_node_local_rank(),
    ]


def expected(rank: int) -> list[Any]:
    size = str(RANKS)
    return [str(rank), str(rank), size, size, size, "127.0.0.1", "29500", str(rank), str(rank), rank]


@pytest.mark.parametrize("engine", [*THREADS, DryEngine])
def test_every_rank_reads_its_own_words(engine: Any) -> None:
    before = dict(os.environ)
    with engine() as made:
        assert made.run(words, world_size=RANKS) == list(map(expected, range(RANKS)))
    assert dict(os.environ) == before and type(os.environ) is os._Environ


def test_ranks_as_processes_read_the_same_words(pool: PoolEngine) -> None:
    assert pool.run(words, world_size=RANKS) == list(map(expected, range(RANKS)))


def test_an_address_that_the_process_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "12345")
    monkeypatch.setenv("RANK", "77")
    with InprocEngine() as engine:
        assert [found[6] for found in engine.run(words, world_size=2)] == ["12345"] * 2


@pytest.mark.parametrize("engine", THREADS)
def test_what_a_rank_changes_is_its_own_and_gone_after_the_run(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDPROOF_GIVEN", "by the process")
    monkeypatch.delenv("SHARDPROOF_MADE", raising=False)

    def program(rank: int) -> tuple[Any, ...]:
        os.environ["SHARDPROOF_MADE"] = str(rank)
        if rank == 1:
            del os.environ["SHARDPROOF_GIVEN"]
        dist.barrier()
        names = [name for name in os.environ if name.startswith("SHARDPROOF_")]
        return (sorted(names), os.environ["SHARDPROOF_MADE"], os.environ.get("SHARDPROOF_GIVEN"), len(os.environ))

    with engine() as made:
        first, second = made.run(program, world_size=2)
    assert first[:3] == (["SHARDPROOF_GIVEN", "SHARDPROOF_MADE"], "0", "by the process")
    assert second[:3] == (["SHARDPROOF_MADE"], "1", None)
    assert first[3] == second[3] + 1
    assert "SHARDPROOF_MADE" not in os.environ and os.environ["SHARDPROOF_GIVEN"] == "by the process"
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    assert libc.getenv(b"SHARDPROOF_MADE") is None and libc.getenv(b"SHARDPROOF_GIVEN") == b"by the process"


def test_a_thread_that_a_rank_starts_reads_the_words_of_its_rank() -> None:
    def program(rank: int) -> str:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(os.environ["RANK"]))
        thread.start()
        thread.join()
        dist.all_reduce(torch.ones(1))
        return found[0]

    with InprocEngine() as engine:
        assert engine.run(program, world_size=RANKS) == ["0", "1", "2"]


def test_wrong_words_are_refused_as_by_python() -> None:
    def program(rank: int) -> list[str]:
        found: list[str] = []
        environ: Any = os.environ
        for wrong in (
            lambda: os.environ["NOT_THERE"],
            lambda: environ.__setitem__("A", 1),
            lambda: os.environ.pop("B"),
        ):
            try:
                wrong()
            except (KeyError, TypeError) as error:
                found.append(type(error).__name__)
        return found

    with InprocEngine() as engine:
        assert engine.run(program, world_size=2) == [["KeyError", "TypeError", "KeyError"]] * 2
