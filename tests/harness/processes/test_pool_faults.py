"""What goes wrong on the pool alone: dead and stopped processes, groups of one rank, values that cannot be sent."""

from __future__ import annotations

import time

import pytest

from harness.engines.processes.forked.pool import PoolEngine
from harness.errors import (
    Desynchronised,
    RankCrashed,
    RankDied,
    RequestError,
    TimeLimit,
)
from tests.harness.engines.programs import calls_alone, calls_then, makes_alone, summed, total


@pytest.fixture
def engine(pool: PoolEngine) -> PoolEngine:
    return pool


@pytest.mark.parametrize("others", ["calls", "ends"])
def test_a_group_that_one_rank_alone_makes_is_waited_for_like_a_call(engine: PoolEngine, others: str) -> None:
    with pytest.raises(Desynchronised):  # its processes are replaced: none has kept such a group, and so would not wait
        engine.run(calls_alone, world_size=2)
    start_s = time.monotonic()
    with pytest.raises(Desynchronised) as problem:
        engine.run(makes_alone, others, world_size=2, timeout_s=60)
    assert time.monotonic() - start_s < 20
    assert "new_group #1 of world (0 1)" in problem.value.cause
    if others == "calls":
        one, two = problem.value.positions
        assert (one.op, two.op, two.state) == ("all_reduce", "new_group", "waits in")
        assert "programs.py:" in two.caller
    assert engine.run(summed, world_size=2) == [total(2)] * 2


@pytest.mark.parametrize(
    ("ending", "how", "kind"),
    [
        ("exit", "its process ended with exit status 3", RankCrashed),
        ("kill", "killed by SIGKILL, as the system does when memory runs out", RankDied),
        ("abort", "killed by SIGABRT", RankCrashed),
        ("segfault", "killed by SIGSEGV", RankCrashed),
        ("child", "its process ended with exit status 0", RankCrashed),
    ],
)
def test_a_dead_rank_is_told_within_a_second(
    engine: PoolEngine, ending: str, how: str, kind: type[RankCrashed | RankDied]
) -> None:
    engine.run(summed, world_size=3)
    start_s = time.perf_counter()
    with pytest.raises(kind) as problem:
        engine.run(calls_then, ending, world_size=3)
    assert problem.value.cause == f"rank 1 of 3 died: {how}"
    dead = problem.value.positions[1]
    assert dead.state == "died" and dead.detail == f"{how}; last call all_reduce #0 of world (0 1 2)"
    assert "programs.py" in dead.caller
    assert time.perf_counter() - start_s < 1.0 + 2.0  # found in less than one; the machine may be busy


def test_a_stopped_process_ends_at_the_limit_too(engine: PoolEngine) -> None:
    engine.run(summed, world_size=2)
    with pytest.raises(TimeLimit, match="no end within 1.5 s: rank 1 runs"):
        engine.run(calls_then, "stop", world_size=2, timeout_s=1.5)
    assert engine.run(summed, world_size=2) == [total(2)] * 2


def test_what_cannot_be_sent_is_a_wrong_request(engine: PoolEngine) -> None:
    with pytest.raises(RequestError, match="cannot be sent to the processes of the ranks.*legal: a function of"):
        engine.run(lambda rank: None, world_size=2)
    with pytest.raises(RequestError, match="the result cannot be sent from the rank's process"):
        engine.run(_unsendable, world_size=1)
    with pytest.raises(
        RequestError, match="observer: ranks are other processes; legal: harness.running.ranks.rank_task"
    ):
        engine.run(summed, world_size=1, observer=object())  # type: ignore[arg-type]


def _unsendable(rank: int) -> object:
    return lambda: rank
