"""Common behaviour of engines whose ranks communicate: errors, positions, ledgers; and the next run is right."""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.harness.engines.engine import Engine, Unwaited
from shardproof.harness.engines.processes.launched.torchrun import TorchrunEngine, serve_driver
from shardproof.harness.errors import (
    Desynchronised,
    RankCrashed,
    RankDied,
    RankRaised,
    RequestError,
    ShardproofError,
    Stalled,
    TimeLimit,
)
from shardproof.harness.running.engines import engine_named
from tests import ROOT
from tests.forked import started
from tests.harness.engines import out_of_step, programs
from tests.harness.engines.out_of_step import CASES, Case
from tests.harness.programs.launched import free_port

Program = Callable[..., Any]
ENGINES = ("inproc", "pool", "torchrun")
LIMIT_S = {"inproc": 0.05, "pool": 20.0, "torchrun": 20.0}
HERE = r"tests/harness/engines/programs\.py:\d+ in "
AFTER = r"last call all_reduce #0 of world \(0 1 2\)"
STALLS = (
    rf"no end within {{limit}} s: rank 1 {{}} at {HERE}_end; for \d\.\d s no rank issued a call, "
    r"and rank 0 2 waits in all_reduce #1 of world \(0 1 2\)"
)
DIES = "rank 1 of 3 died: "
KILLED, SEGFAULT = "killed by SIGKILL, as the system does when memory runs out", "killed by SIGSEGV"
EXITS = "its process ended with exit status 3"
ENDINGS: dict[str, tuple[type[ShardproofError], str, str]] = {
    "raise": (
        RankRaised,
        f"rank 1 of 3 raised ValueError: bad layer, at {HERE}_end",
        f"raised: ValueError: bad layer, at {HERE}_end",
    ),
    "exit": (RankCrashed, f"{DIES}{EXITS}", f"died: {EXITS}; {AFTER}, at {HERE}calls_then"),
    "kill": (RankDied, f"{DIES}{KILLED}", f"died: {KILLED}; {AFTER}, at {HERE}calls_then"),
    "segfault": (RankCrashed, f"{DIES}{SEGFAULT}", f"died: {SEGFAULT}; {AFTER}, at {HERE}calls_then"),
    "loop": (Stalled, STALLS.format("runs", limit="{limit}"), f"runs: {AFTER}, at {HERE}_end"),
    "sleep": (Stalled, STALLS.format("runs", limit="{limit}"), f"runs: {AFTER}, at {HERE}_end"),
    "stop": (Stalled, STALLS.format("is stopped", limit="{limit}"), f"is stopped: {AFTER}, at {HERE}_end"),
}
"""How rank 1 ends after its first call -> the error, its first line, and the rank's own line, as patterns."""
OUT_OF_STEP = [
    pytest.param(
        name,
        case,
        id=f"{name}-{case.program.__name__}-{case.world_size}",
        marks=pytest.mark.deep("a CPU second each") if name == "torchrun" and number % 4 else (),
    )
    for name in ENGINES
    for number, case in enumerate(CASES)
    if name == "inproc" or case.program is not out_of_step.lives_differ  # which needs a rendezvous that no pool has
]
"""Ranks that are launched are watched as those of a pool, so every fourth case will do for them."""


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param != "inproc":
        made = request.getfixturevalue(request.param)
        made.run(programs.summed, world_size=3)  # processes start
        yield made
        return
    with engine_named(request.param) as made:
        made.run(programs.summed, world_size=2)  # the first backward of a process imports much
        yield made


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Three launched ranks with torchrun's words: this process is rank 0, the others are forked and serve it."""
    meeting = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    words = [{**meeting, "RANK": rank, "LOCAL_RANK": rank} for rank in "012"]
    others = [started(_serves_here, folder=tmp_path_factory.mktemp("rank"), environment=mine) for mine in words[1:]]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in words[0].items():
            patch.setenv(name, value)
        made = TorchrunEngine()
    with made:
        yield made
    assert [other.ended() for other in others] == [0, 0]


def _serves_here() -> int:
    os.chdir(ROOT)
    return serve_driver()


def ended(
    engine: Engine, program: Program, *args: Any, world_size: int = 2, timeout_s: float = 60.0, limit_s: float = 0.0
) -> Any:
    """The error in which a run ends, within the engine's limit or this one; the next run is right.

    The in-process engine has three tries, as the machine may be busy.
    """
    took: list[float] = []
    for _ in range(3 if engine.name == "inproc" else 1):
        start_s = time.perf_counter()
        with pytest.raises(ShardproofError) as problem:
            engine.run(program, *args, world_size=world_size, timeout_s=timeout_s)
        took.append(time.perf_counter() - start_s)
    assert min(took) < (limit_s or LIMIT_S[engine.name]) + (
        timeout_s if isinstance(problem.value, TimeLimit | Stalled) else 0
    )
    assert engine.run(programs.summed, world_size=2) == [programs.total(2)] * 2
    return problem.value


@pytest.mark.parametrize(("engine", "case"), OUT_OF_STEP, indirect=["engine"])
def test_ranks_out_of_step_end_in_one_error_with_every_position(engine: Engine, case: Case) -> None:
    """Many of them gloo does not mind: dtype, reduce op, shape, rows, a work without a wait."""
    error = ended(engine, case.program, world_size=case.world_size)
    assert isinstance(error, Desynchronised) and error.exit_status == 1
    assert error.kind == case.kind
    assert (error.cause, error.ranks) == (case.cause, case.ranks)
    assert str(error).splitlines()[0] == case.cause
    assert [position.rank for position in error.positions] == list(range(case.world_size))
    places = [f"{position.call}: {position.detail}" if position.call else "" for position in error.positions]
    assert not case.calls or tuple(places) == case.calls
    code = case.program.__code__
    for position in error.positions:
        if position.state == "waits in":
            assert position.op and position.number >= 0 and position.group
            found = re.search(r"(\w+)\.py:(\d+) in (\S+)$", position.caller)
            assert found and found[1] == Path(code.co_filename).stem
            assert code.co_firstlineno < int(found[2]) < code.co_firstlineno + 8
            assert found[3] in {case.program.__name__, "<lambda>"}
        else:
            assert position.state == "finished" or engine.name != "inproc"


@pytest.mark.parametrize(
    ("kind", "text", "cause"),
    [("odd", "OddError: not here", programs.OddError), ("backward", "ValueError: no gradient wanted", ValueError)],
)
def test_an_exception_is_told_with_its_rank_line_and_traceback(
    engine: Engine, kind: str, text: str, cause: type[Exception]
) -> None:
    error = ended(engine, programs.raises, kind)
    assert isinstance(error, RankRaised) and error.ranks == (1,) and error.exit_status == 1
    assert error.cause.startswith(f"rank 1 of 2 raised {text}, at ") and "programs.py:" in error.cause
    sent = RuntimeError if engine.remote and kind == "odd" else cause
    assert type(error.__cause__) is sent
    if engine.remote:
        assert "Traceback" in "".join(error.__cause__.__notes__)
    waits, raised = error.positions
    assert (waits.state, waits.call, raised.state) == ("waits in", "all_reduce #0 of world (0 1)", "raised")


def test_leaving_by_sys_exit_is_an_end_when_it_says_success_and_a_failure_otherwise(engine: Engine) -> None:
    assert engine.run(programs.exits, 0, world_size=2) == ["end", None]
    error = ended(engine, programs.exits, 3)
    assert isinstance(error.__cause__, SystemExit) and error.__cause__.code == 3


@pytest.mark.parametrize(
    ("engine", "kind"),
    [(name, kind) for name in ENGINES for kind in ENDINGS if name != "inproc" or kind in ("raise", "loop")],
    indirect=["engine"],
)
def test_a_rank_that_ends_badly_is_told_with_its_line_and_what_the_others_wait_for(engine: Engine, kind: str) -> None:
    """Where ranks are threads, a program that ends or stops its process does so to all of them and to the caller."""
    expected, cause, own = ENDINGS[kind]
    stalls = expected is Stalled
    limit_s = 0.2 if not engine.remote else 2.5 if stalls else 30.5  # ranks may be late, and a stall is awaited
    error = ended(engine, programs.calls_then, kind, world_size=3, timeout_s=limit_s, limit_s=0 if engine.remote else 1)
    if stalls and not engine.remote:  # that other ranks wait is only for want of the turn
        cause = cause.partition("; ")[0].replace("runs", "(runs|is blocked)") + ".*"
        expected, own = TimeLimit, f"runs, at {HERE}_end"
    assert (type(error), error.ranks) == (expected, (1,))
    assert error.exit_status == (3 if expected in (RankDied, TimeLimit) else 1)
    first, *lines = str(error).splitlines()
    for line, pattern in zip([first, lines[1]], [cause, f"  rank 1: {own}"], strict=True):
        assert re.fullmatch(pattern.format(limit=limit_s), line), (line, pattern)
    for rank in (0, 2):
        waits = rf"  rank {rank}: waits in all_reduce #1 of world \(0 1 2\): sum float32 3, at {HERE}calls_then"
        assert re.fullmatch(waits, lines[rank])
    runs = error.positions[1]
    if stalls and engine.remote:
        assert "in _end" in runs.stack[0] and "in calls_then" in runs.stack[1] and error.positions[0].stack


def test_time_that_a_rank_compiles_is_no_part_of_the_limit(engine: Engine) -> None:
    """The engine says meanwhile that it is alive: else the process of the case would be ended from outside."""
    signs: list[float] = []
    engine.alive = lambda: signs.append(time.monotonic())
    try:
        assert engine.run(programs.compiles, 2.0, world_size=2, timeout_s=1.2) == [2.0, 2.0]
    finally:
        engine.alive = str
    assert signs


def test_wrong_requests_are_refused_and_so_is_a_closed_engine(engine: Engine) -> None:
    for words, text in (
        ({"world_size": 0}, "world_size 0: must be at least 1; legal: 2"),
        ({"world_size": 2, "timeout_s": 0}, "timeout_s 0: must be above 0; legal: 60"),
    ):
        with pytest.raises(RequestError) as problem:
            engine.run(programs.summed, **words)  # type: ignore[arg-type]
        assert str(problem.value) == text and problem.value.exit_status == 2
    if engine.name == "torchrun":
        return  # another one takes other processes
    closed = engine_named(engine.name)
    closed.close()
    with pytest.raises(RequestError, match=rf"run: the engine is closed; legal: a new {type(engine).__name__}\(\)"):
        closed.run(programs.summed, world_size=1)


def test_works_that_nobody_waited_for_are_listed_and_still_completed(engine: Engine) -> None:
    log = None if engine.remote else programs.Log()
    assert engine.run(programs.leaves_works, world_size=2, observer=log) == [[3, 3, 2, 2]] * 2
    line = programs.leaves_works.__code__.co_firstlineno + 3
    place = f"tests/harness/engines/programs.py:{line}"
    assert engine.unwaited == (Unwaited(rank=1, op="all_reduce", number=2, group="world (0 1)", caller=place),)
    assert log is None or sorted(ticket for _, ticket in log.completions) == list(range(len(log.calls)))
    assert engine.run(programs.summed, world_size=2) and not engine.unwaited


def test_a_program_may_ask_for_its_calls_until_they_are_complete_and_wait_for_none(engine: Engine) -> None:
    log = None if engine.remote else programs.Log()
    assert engine.run(programs.polls, world_size=2, observer=log) == [12.0] * 2
    assert not engine.unwaited
    assert log is None or sorted(ticket for _, ticket in log.completions) == list(range(len(log.calls)))


def test_a_functional_result_that_nothing_reads_needs_no_wait_and_one_of_an_operator_does(engine: Engine) -> None:
    assert engine.run(programs.drops_results, world_size=2) == [12.0] * 2
    place = f"tests/harness/engines/programs.py:{programs.drops_results.__code__.co_firstlineno + 8}"
    left = Unwaited(rank=0, op="all_reduce", number=4, group="world (0 1)", caller=place)
    assert engine.unwaited == (left, replace(left, rank=1))


def test_torch_waits_for_its_own_works(engine: Engine) -> None:
    torch.manual_seed(0)
    first = torch.nn.Linear(2, 1, bias=False).weight.flatten().tolist()
    assert engine.run(programs.wrapped, world_size=2) == [[*first, *[1.5] * 6]] * 2
    assert not engine.unwaited


@pytest.mark.parametrize("name", ["inproc", "pool", "dry"])
def test_every_rank_reads_its_own_words_of_the_environment(name: str, request: pytest.FixtureRequest) -> None:
    made: Engine = request.getfixturevalue("pool") if name == "pool" else engine_named(name)
    own = [[str(rank), str(rank), *["3"] * 3, "127.0.0.1", "29500", str(rank), str(rank), rank] for rank in range(3)]
    assert made.run(programs.words, world_size=3) == own


def test_a_program_that_initialises_torch_itself_gets_the_world_that_exists(engine: Engine) -> None:
    for rank, told in enumerate(engine.run(programs.initialises, world_size=2)):
        rule = f"the engine runs this {'process' if engine.remote else 'thread'} as rank {rank} of 2"
        assert told == [
            f"init_process_group world_size=8: {rule}; legal: world_size=2, or leave it out",
            f"init_process_group rank={1 - rank}: {rule}; legal: rank={rank}, or leave it out",
            "trying to initialize the default process group twice!",
        ]
