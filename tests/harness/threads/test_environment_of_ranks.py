"""os.environ of ranks that are threads: what a rank changes is its own, and gone after the run."""

import ctypes
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.engines.threads.inproc import InprocEngine
from tests.harness.engines import programs

RANKS = 3


def test_an_address_that_the_process_was_given_stays(monkeypatch: pytest.MonkeyPatch, engine: InprocEngine) -> None:
    monkeypatch.setenv("MASTER_PORT", "12345")
    monkeypatch.setenv("RANK", "77")
    assert [found[6] for found in engine.run(programs.words, world_size=2)] == ["12345"] * 2


def test_what_a_rank_changes_is_its_own_and_gone_after_the_run(
    monkeypatch: pytest.MonkeyPatch, engine: InprocEngine
) -> None:
    monkeypatch.setenv("SHARDPROOF_GIVEN", "by the process")
    monkeypatch.delenv("SHARDPROOF_MADE", raising=False)

    def program(rank: int) -> tuple[Any, ...]:
        os.environ["SHARDPROOF_MADE"] = str(rank)
        if rank == 1:
            del os.environ["SHARDPROOF_GIVEN"]
        dist.barrier()
        names = [name for name in os.environ if name.startswith("SHARDPROOF_")]
        return (sorted(names), os.environ["SHARDPROOF_MADE"], os.environ.get("SHARDPROOF_GIVEN"), len(os.environ))

    first, second = engine.run(program, world_size=2)
    assert first[:3] == (["SHARDPROOF_GIVEN", "SHARDPROOF_MADE"], "0", "by the process")
    assert second[:3] == (["SHARDPROOF_MADE"], "1", None)
    assert first[3] == second[3] + 1
    assert "SHARDPROOF_MADE" not in os.environ and os.environ["SHARDPROOF_GIVEN"] == "by the process"
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    assert libc.getenv(b"SHARDPROOF_MADE") is None and libc.getenv(b"SHARDPROOF_GIVEN") == b"by the process"


def test_a_thread_that_a_rank_starts_reads_the_words_of_its_rank(engine: InprocEngine) -> None:
    def program(rank: int) -> str:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(os.environ["RANK"]))
        thread.start()
        thread.join()
        dist.all_reduce(torch.ones(1))
        return found[0]

    assert engine.run(program, world_size=RANKS) == ["0", "1", "2"]


def test_wrong_words_are_refused_as_by_python(engine: InprocEngine) -> None:
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

    assert engine.run(program, world_size=2) == [["KeyError", "TypeError", "KeyError"]] * 2
