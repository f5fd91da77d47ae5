"""Ranks that are processes: dead and stopped ones, results that cannot be sent, processors, hash seeds, a clock."""

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from harness.checking.checks import CHECKS
from harness.checking.evidence import FAIL, PASS
from harness.engines.engine import Engine, RunRequest
from harness.engines.processes.flight_recorder import _COUNT, FlightRecorder, ReadCalls, Recording, anonymous_file
from harness.engines.processes.forked.pool import PoolEngine
from harness.engines.processes.forked.worker import share
from harness.engines.processes.rank_program import run_rank
from harness.engines.threads.inproc import InprocEngine
from harness.errors import Desynchronised, RankCrashed, RankDied, RequestError, TimeLimit
from harness.recording.spans import RankSpan
from harness.running.proof import prove
from harness.running.ranks.execution import execute
from parallel.pipeline.prediction import CasePipeline
from parallel.subject import subject
from reference.case import Case
from tests.harness.engines.programs import calls_alone, calls_then, makes_alone, summed, total
from tests.harness.toy_subjects import LoopEngine


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
        RequestError, match="observer: ranks are other processes; legal: harness.running.ranks.execution"
    ):
        engine.run(summed, world_size=1, observer=object())  # type: ignore[arg-type]


def _unsendable(rank: int) -> object:
    return lambda: rank


def place(_rank: int) -> tuple[set[int], set[int]]:
    """Where this rank runs: its main thread, and all its threads."""
    threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
    return os.sched_getaffinity(0), set().union(*threads)


def test_ranks_take_processors_in_turn_when_there_are_not_more_and_else_are_free() -> None:
    assert [share({4, 9}, rank, 4) for rank in range(4)] == [{4}, {9}, {4}, {9}]
    assert [share({4, 9}, rank, 2) for rank in range(2)] == [{4}, {9}]
    assert share({0, 3, 7}, 1, 2) == {0, 3, 7}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not place processes")
def test_the_ranks_of_a_pool_are_placed_and_its_driver_is_not(pool: PoolEngine) -> None:
    before = os.sched_getaffinity(0)
    worlds = (2, 1) if len(before) > 1 else (2,)
    for world_size in worlds:  # processes are used again, as ranks of another world
        found = pool.run(place, world_size=world_size)
        assert found == [(share(before, rank, world_size),) * 2 for rank in range(world_size)]
    assert os.sched_getaffinity(0) == before


TEXT = "mode=tp tp=2 layers=1 dtype=float64 metric=true"


def test_times_of_all_ranks_are_of_one_clock(engine: PoolEngine) -> None:
    """No rank's all_reduce ends before every rank's has begun."""
    events = execute(Case.parse(TEXT), subject, engine, text="").events
    calls = [[e for e in events if e.rank == rank and e.op == "all_reduce" and not e.is_async] for rank in (0, 1)]
    assert calls[0] and len(calls[0]) == len(calls[1])
    for one, other in zip(*calls, strict=True):
        assert one.start_us + one.duration_us >= other.start_us
        assert other.start_us + other.duration_us >= one.start_us


def test_a_failure_is_repeated_on_the_pool(engine: PoolEngine) -> None:
    result = prove(Case.parse(TEXT), "tests.harness.toy_subjects:wrong", engine, options="--engine pool")
    assert result.verdict == "fail"
    failed = next(verdict for verdict in result.verdicts if verdict.verdict == "fail")
    assert "--engine pool" in failed.message.splitlines()[-1]


def test_a_sum_in_the_order_of_a_set_is_a_replica_conflict_on_processes_and_none_on_threads(engine: PoolEngine) -> None:
    case = Case.parse("mode=tp tp=2 layers=1 hidden=16 heads=2 seq=4 steps=1")
    asked = {name: CHECKS[name] for name in ("replicas", "forward")}

    def verdicts(on: Engine) -> dict[str, str]:
        result = prove(case, "tests.harness.toy_subjects:in_set_order", on, checks=asked)
        return {verdict.check: verdict.verdict for verdict in result.verdicts}

    with InprocEngine() as threads:
        assert verdicts(threads) == {"replicas": PASS, "forward": PASS}, "threads share one hash seed"
    assert verdicts(engine)["replicas"] == FAIL


SIZES = "tp=1 pp=2 heads=2 hidden=8 ffn=12 vocab=20 seq=8 steps=2"
CASES = (
    f"mode=tp {SIZES} layers=3 first_layers=2 micro=3",
    f"mode=tp-sp {SIZES} layers=4 micro=3 schedule=interleaved chunks=2 group=3 cp=2",
)
COMPUTED = ("F", "B")


def wrong(case: Case, spans: tuple[RankSpan, ...]) -> list[str]:
    """Contradictions to the programs of the case's stages: computations, their order, or what they had to wait for."""
    found = []
    at = {rank: place for group in case.axes["pp"] for place, rank in enumerate(group)}
    programs = CasePipeline(case=case).programs
    for rank, place in at.items():
        own = [span for span in spans if span.rank == rank and span.kind in COMPUTED]
        order = [(a.kind, a.micro, a.chunk) for step in programs[place] for a in step if a.kind.computes]
        if [(span.kind, span.micro, span.chunk) for span in own] != order * case.steps:
            found.append(f"rank {rank} computes in another order")
        if any(one.end_us > next_.start_us for one, next_ in pairwise(own)):
            found.append(f"rank {rank} computes twice at once")
        if [span.step for span in own] != sorted(step for step in range(case.steps) for _ in order):
            found.append(f"rank {rank} is in another step")
    for group in case.axes["pp"]:
        ends = {(s.step, s.kind, s.micro, s.chunk * case.pp + at[s.rank]): s for s in spans if s.rank in group}
        for (step, kind, micro, stage), span in ends.items():
            before = ends.get((step, kind, micro, stage + (1 if kind == "B" else -1)))
            if kind in COMPUTED and before is not None and span.start_us < before.end_us:
                found.append(f"{kind}{micro} of stage {stage} begins before its input is there")
    return found


@pytest.mark.parametrize("words", CASES)
def test_ranks_compute_in_the_order_of_the_schedule_and_after_their_inputs(words: str, pool: PoolEngine) -> None:
    case = Case.parse(words)
    spans = execute(case, subject, pool, text=words).spans
    assert wrong(case, spans) == []
    calls = [span for span in spans if span.kind not in COMPUTED]
    assert {span.kind for span in calls} >= {"send", "recv"}
    assert all(span.start_us <= span.end_us for span in spans)
    early = [replace(span, start_us=0.0) if span.kind == "B" else span for span in spans]
    swapped = [replace(span, micro=(span.micro + 1) % case.micro) if span.kind == "F" else span for span in spans]
    assert wrong(case, tuple(early)) and wrong(case, tuple(swapped))


def test_ranks_that_take_turns_have_no_picture() -> None:
    case = Case.parse(CASES[0])
    with InprocEngine() as engine:
        run = execute(case, subject, engine, text="")
    assert run.events and run.spans == ()


CASE = Case.parse("mode=tp tp=1 layers=1 dtype=float64 metric=true")


class OneProcess(LoopEngine):
    """A remote engine of one rank, which is this process on gloo; everything goes through pickle."""

    name = "one"
    remote = True

    def run_request(self, request: RunRequest, observer: object) -> list[Any]:
        """The result of the one rank; an exception of it is raised."""
        sent, given = pickle.loads(pickle.dumps((request.program, request.args)))
        store = torch._C._distributed_c10d.HashStore()
        ended = run_rank(sent, given, rank=0, world_size=1, store=store, seed=request.seed, timeout_s=10)
        if ended.error is not None:
            raise ended.error
        return [pickle.loads(pickle.dumps(ended.value))]


def test_a_subject_that_cannot_be_sent_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match="subject .*<lambda>: cannot be sent to .*; legal: name it module:object"):
        execute(CASE, lambda case, device: {}, OneProcess(), text="")


def test_what_a_rank_raises_comes_with_its_traceback_even_when_it_cannot_be_pickled() -> None:
    class Odd(Exception):
        pass

    def fails(error: Exception) -> Callable[[int], None]:
        def program(rank: int) -> None:
            raise error

        return program

    for error, kind in ((KeyError("weight"), KeyError), (Odd("weight"), RuntimeError)):
        store = torch._C._distributed_c10d.HashStore()
        found = run_rank(fails(error), (), rank=0, world_size=1, store=store, seed=0, timeout_s=10)
        assert type(found.error) is kind and "weight" in found.detail
        assert "raise error" in "".join(found.error.__notes__)
        assert "test_pool.py" in found.caller and not torch.distributed.is_initialized()


def test_a_recording_that_is_read_while_it_is_written_has_every_call_once() -> None:
    file = anonymous_file()
    recorder, recording = FlightRecorder(file), Recording(file)
    recording.begin(1)
    assert recording.read() == ReadCalls()
    recorder.begin(1)
    recorder.makes_group("1", (0, 1))
    assert [call.group for _, call in recording.read().new] == ["1"]
    for count in (0, 1):  # a number is cleared before it is written
        recorder._put(_COUNT, count)
        assert recording.read().new == ()
    recorder.makes_group("2", (0, 1))
    assert [call.group for _, call in recording.read().new] == ["2"]
    os.close(file)
