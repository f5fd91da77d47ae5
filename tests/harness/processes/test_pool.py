"""Ranks that are processes: dead ones, results that cannot be sent, hash seeds, spans of pipelines, recordings."""

import multiprocessing
import os
import sys
import time
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import pytest

from shardproof.harness.checking.checks import CHECKS
from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.processes.flight_recorder import (
    _COUNT,
    FlightRecorder,
    ReadCalls,
    Recording,
    anonymous_file,
)
from shardproof.harness.engines.processes.forked.pool import PoolEngine, hash_seed
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import Desynchronised, RankCrashed, RequestError
from shardproof.harness.recording.spans import RankSpan
from shardproof.harness.running.proof import prove
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.verdicts.verdict import FAIL, PASS
from shardproof.parallel.pipeline import CasePipeline
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from tests.harness.engines.programs import calls_alone, calls_then, makes_alone, parent_of, summed, total
from tests.harness.processes.test_pool_endings import family

TEXT = "mode=tp tp=2 layers=1 dtype=float64 metric=true"


@pytest.fixture
def engine(pool: PoolEngine) -> PoolEngine:
    return pool


def test_a_group_that_one_rank_alone_makes_is_waited_for_like_a_call(engine: PoolEngine) -> None:
    with pytest.raises(Desynchronised):  # its processes are replaced: none has kept such a group, and so would not wait
        engine.run(calls_alone, world_size=2)
    start_s = time.monotonic()
    with pytest.raises(Desynchronised, match=r"new_group #1 of world \(0 1\)") as problem:
        engine.run(makes_alone, world_size=2, timeout_s=60)
    assert time.monotonic() - start_s < 20
    one, two = problem.value.positions
    assert (one.op, two.op, two.state) == ("all_reduce", "new_group", "waits in")
    assert "programs.py:" in two.caller
    assert engine.run(summed, world_size=2) == [total(2)] * 2


def test_a_dead_rank_is_told_within_a_second_and_takes_with_it_what_it_started(engine: PoolEngine) -> None:
    engine.run(summed, world_size=3)
    start_s = time.perf_counter()
    with pytest.raises(RankCrashed, match="rank 1 of 3 died: its process ended with exit status 0"):
        engine.run(calls_then, "child", world_size=3)
    assert time.perf_counter() - start_s < 1.0 + 2.0  # found in less than one; the machine may be busy
    parents = {1, *family(engine)}
    sleepers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and sleeps(path)]
    assert not [pid for pid in sleepers if parent_of(pid) in parents]


def sleeps(process: Path) -> bool:
    try:
        return (process / "cmdline").read_bytes() == b"sleep\x00600\x00"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_cannot_be_sent_is_a_wrong_request(engine: PoolEngine) -> None:
    with pytest.raises(RequestError, match="cannot be sent to the processes of the ranks.*legal: a function of"):
        engine.run(lambda rank: None, world_size=2)
    with pytest.raises(RequestError, match="subject .*<lambda>: cannot be sent to .*; legal: name it module:object"):
        execute(Case.parse(TEXT), lambda case, device: {}, engine, text="")
    with pytest.raises(RequestError, match="the result cannot be sent from the rank's process"):
        engine.run(_unsendable, world_size=1)
    with pytest.raises(RequestError, match="observer: ranks are other processes; legal: one that observes there"):
        engine.run(summed, world_size=1, observer=object())  # type: ignore[arg-type]


def start_method(pipe: Connection, _memory: int) -> None:
    pipe.send(multiprocessing.get_start_method(allow_none=True))


def test_a_rank_runs_no_script_of_the_driver_and_may_choose_how_it_starts_processes(
    engine: PoolEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.run(summed, world_size=1)
    script, main = tmp_path / "without_a_guard.py", ModuleType("__main__")
    script.write_text("from pathlib import Path\nPath(__file__).unlink()\n")
    monkeypatch.setattr(main, "__file__", str(script), raising=False)
    monkeypatch.setitem(sys.modules, "__main__", main)
    before = multiprocessing.get_start_method(allow_none=True)
    worker = engine._pool._servers[hash_seed(0)].start(start_method)
    assert worker.pipe.recv() is None and script.exists()
    assert multiprocessing.get_start_method(allow_none=True) == before
    worker.close()


def _unsendable(rank: int) -> object:
    return lambda: rank


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
    """What contradicts the programs of the case's stages: other computations, another order, or one that began too
    early.
    """
    found = []
    at = {rank: place for group in case.axes["pp"] for place, rank in enumerate(group)}
    programs = CasePipeline(case=case).programs
    for rank, place in at.items():
        own = [span for span in spans if span.rank == rank and span.kind in COMPUTED]
        order = [(a.kind, a.micro, a.chunk) for step in programs[place] for a in step if a.kind in ("F", "B")]
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
