"""The pool tells what goes wrong on gloo in the in-process engine's words, and the next run is right again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from harness.engines.processes.forked.pool import PoolEngine
from harness.engines.threads.inproc import InprocEngine
from harness.errors import (
    Desynchronised,
    RankCrashed,
    RankDied,
    RankRaised,
    RequestError,
    TimeLimit,
)
from tests.harness.faults import faulty_programs as faulty
from tests.harness.faults.test_inproc_faults import CASES, Case
from tests.harness.processes.pool_programs import (
    calls_then,
    leaves_works,
    makes_alone,
    raises,
    summed,
    total,
    waits_alone,
    wrapped,
)

OTHERWISE = {faulty.lives_differ}
"""A second life of the default group needs a rendezvous, which a rank of the pool has not."""


@pytest.fixture
def engine(pool: PoolEngine) -> PoolEngine:
    return pool


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.program not in OTHERWISE],
    ids=lambda case: f"{case.program.__name__}-{case.world_size}",
)
def test_ranks_out_of_step_are_told_as_by_the_in_process_engine(engine: PoolEngine, case: Case) -> None:
    """Many of them gloo does not mind: dtype, reduce op, shape, rows, a work that nobody waits for."""
    with pytest.raises(Desynchronised) as problem:
        engine.run(case.program, world_size=case.world_size, timeout_s=60)
    error = problem.value
    assert (error.cause, error.kind, error.ranks) == (case.cause, case.kind, case.ranks)
    assert [position.rank for position in error.positions] == list(range(case.world_size))
    for position in error.positions:
        assert position.state in {"waits in", "passed", "finished", "runs"}
        if position.op:
            assert Path(case.program.__code__.co_filename).name in position.caller


@pytest.mark.parametrize("others", ["calls", "ends"])
def test_a_group_that_one_rank_alone_makes_is_waited_for_like_a_call(engine: PoolEngine, others: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(Desynchronised) as problem:
        engine.run(makes_alone, others, world_size=2, timeout_s=60)
    assert time.monotonic() - start_s < 20
    assert "new_group #1 of world (0 1)" in problem.value.cause
    if others == "calls":
        one, two = problem.value.positions
        assert (one.op, two.op, two.state) == ("all_reduce", "new_group", "waits in")
        assert "pool_programs.py:" in two.caller
    assert engine.run(summed, world_size=2) == [total(2)] * 2


def test_after_an_error_the_next_run_is_right(engine: PoolEngine) -> None:
    with pytest.raises(Desynchronised):
        engine.run(faulty.reduce_ops_differ, world_size=2)
    for world_size in (3, 2, 3):
        assert engine.run(summed, world_size=world_size) == [total(world_size)] * world_size


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
    assert "pool_programs.py" in dead.caller
    assert time.perf_counter() - start_s < 1.0 + 2.0  # found in less than one; the machine may be busy


@pytest.mark.parametrize(
    ("kind", "text", "cause"),
    [
        ("plain", "KeyError: 'missing'", KeyError),
        ("odd", "OddError: not here", RuntimeError),
        ("backward", "ValueError: no gradient wanted", ValueError),
    ],
)
def test_an_exception_is_told_with_its_rank_and_traceback(
    engine: PoolEngine, kind: str, text: str, cause: type[Exception]
) -> None:
    with pytest.raises(RankRaised) as problem:
        engine.run(raises, kind, world_size=2)
    error = problem.value
    assert error.cause.startswith(f"rank 1 of 2 raised {text}, at ") and "pool_programs.py:" in error.cause
    assert error.ranks == (1,) and type(error.__cause__) is cause
    assert "Traceback" in "".join(error.__cause__.__notes__)
    waits, raised = error.positions
    assert (waits.state, waits.call) == ("waits in", "all_reduce #0 of world (0 1)") and waits.stack
    assert raised.state == "raised"


def test_a_rank_that_hangs_is_told_at_the_limit_with_its_line(engine: PoolEngine) -> None:
    engine.run(summed, world_size=2)  # so that the limit is spent in the program, not on connecting
    with pytest.raises(TimeLimit) as problem:
        engine.run(calls_then, "loop", world_size=2, timeout_s=1.5)
    waits, runs = problem.value.positions
    assert problem.value.cause.startswith(
        "no end within 1.5 s: rank 1 runs at tests/harness/processes/pool_programs.py:"
    )
    assert (waits.state, waits.number) == ("waits in", 1)
    assert runs.state == "runs" and runs.detail == "last call all_reduce #0 of world (0 1)"
    assert "in _end" in runs.stack[0] and "in calls_then" in runs.stack[1]


def test_a_stopped_process_ends_at_the_limit_too(engine: PoolEngine) -> None:
    engine.run(summed, world_size=2)
    with pytest.raises(TimeLimit, match="no end within 1.5 s: rank 1 runs"):
        engine.run(calls_then, "stop", world_size=2, timeout_s=1.5)
    assert engine.run(summed, world_size=2) == [total(2)] * 2


def test_a_rank_that_waits_for_an_asynchronous_call_nobody_else_makes_is_told(engine: PoolEngine) -> None:
    with pytest.raises(Desynchronised) as problem:
        engine.run(waits_alone, world_size=2)
    assert problem.value.cause == "rank 1 has finished, but rank 0 waits for it in all_reduce #0 of world (0 1)"
    assert problem.value.kind == "skipped"


def test_works_that_nobody_waited_for_are_told_as_by_the_in_process_engine(engine: PoolEngine) -> None:
    with InprocEngine() as inproc:
        inproc.run(leaves_works, world_size=2)
        here = inproc.unwaited
    assert engine.run(leaves_works, world_size=2) == [[3, 3, 2, 2]] * 2
    assert len(here) == 1 and engine.unwaited == here
    assert engine.run(wrapped, world_size=2) == [[1.5] * 6] * 2, "torch waits for its own works"
    assert not engine.unwaited


def test_what_cannot_be_sent_is_a_wrong_request(engine: PoolEngine) -> None:
    with pytest.raises(RequestError, match="cannot be sent to the processes of the ranks.*legal: a function of"):
        engine.run(lambda rank: None, world_size=2)
    with pytest.raises(RequestError, match="the result cannot be sent from the rank's process"):
        engine.run(_unsendable, world_size=1)
    with pytest.raises(
        RequestError, match="observer: ranks are other processes; legal: harness.running.ranks.execution"
    ):
        engine.run(summed, world_size=1, observer=object())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="world_size 0"):
        engine.run(summed, world_size=0)
    with pytest.raises(RequestError, match="timeout_s 0"):
        engine.run(summed, world_size=1, timeout_s=0)


def _unsendable(rank: int) -> object:
    return lambda: rank
