"""Ranks that raise, hang, or misuse the in-process engine: one error of the right branch, and the engine goes on.

Threads that a rank starts are in its world; a rank that is blocked by another one outside of calls ends in time.
"""

import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardproof.harness.engines.starvation import Starvation
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.engines.threads.rank_threads import RankThreads, do_nothing, interrupt
from shardproof.harness.errors import NotComputed, RankRaised, RequestError, TimeLimit
from shardproof.harness.running.ranks.execution import execute
from shardproof.reference.case import Case
from tests.harness.engines import out_of_step, programs
from tests.harness.engines.test_conformance import ended


def raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("bad shape\nsecond line")
    dist.all_reduce(torch.ones(2))


def usable(engine: InprocEngine) -> bool:
    """The engine runs a right program after whatever came before."""
    return engine.run(programs.summed, world_size=3) == [programs.total(3)] * 3


def test_all_ranks_that_raise_are_listed(engine: InprocEngine) -> None:
    def program(rank: int) -> None:
        raise KeyError(rank)

    error = ended(engine, program, world_size=3)
    assert error.ranks == (0, 1, 2) and error.cause.startswith("rank 0 of 3 raised KeyError: 0, at ")


def test_a_rank_that_swallows_everything_cannot_swallow_the_end(engine: InprocEngine) -> None:
    def program(rank: int) -> str:
        for _ in range(2):
            try:
                raises(rank)
            except Exception:
                seen.append(rank)
                raise
            except BaseException:
                if rank == 1:
                    raise
        return "went on"

    seen: list[int] = []
    error = ended(engine, program, world_size=3)
    assert isinstance(error, RankRaised) and error.ranks == (1,) and set(seen) == {1}


class Dropped:
    """An object whose end takes most of the time of a loop that makes such ones."""

    def __del__(self) -> None:
        for _ in range(2_000):
            pass
        if self.raises:
            raise ValueError("dropped")

    raises = False


def test_an_interruption_that_python_cannot_raise_is_not_reported(
    engine: InprocEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(rank: int) -> None:
        ranks.append(threading.current_thread())
        while not stop.is_set():
            Dropped()

    reported, stop, ranks = list[Any](), threading.Event(), list[threading.Thread]()
    for owner, hook in ((sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(owner, hook, lambda unhandled: reported.append(unhandled.exc_type))
    with pytest.raises(TimeLimit):  # the thread is abandoned: an interruption can hardly ever be raised in it
        engine.run(program, world_size=2, timeout_s=0.3)
    stop.set()

    def interrupt_itself() -> None:
        interrupt(threading.current_thread())
        time.sleep(0.01)

    ending = threading.Thread(target=interrupt_itself)
    ending.start()
    for thread in (ending, *ranks):
        thread.join(10)
        assert not thread.is_alive()
    one = Dropped()
    one.raises = True
    del one
    assert reported == [ValueError], "any other exception goes to the hook that was there"


def test_a_rank_that_is_stuck_in_native_code_is_abandoned_and_named(engine: InprocEngine) -> None:
    released = threading.Event()

    def program(rank: int) -> None:
        if rank == 0:
            released.wait(30)
        dist.barrier()

    with pytest.raises(TimeLimit) as problem:
        engine.run(program, world_size=2, timeout_s=0.1)
    error = problem.value
    assert error.abandoned == (0,)
    assert error.cause.endswith("; rank 0 is in native code and could not be interrupted: thread abandoned")
    assert usable(engine)
    released.set()
    assert usable(engine)


def test_a_fault_is_told_even_when_another_rank_never_comes_back(engine: InprocEngine) -> None:
    def program(rank: int) -> None:
        if rank == 0:
            raise ValueError("the root cause")
        while True:
            pass

    error = ended(engine, program, limit_s=1.0)
    assert error.cause.startswith("rank 0 of 2 raised ValueError: the root cause, at ")
    assert error.positions[1].state == "runs"


def test_an_interrupt_of_the_caller_ends_the_ranks(engine: InprocEngine) -> None:
    before = threading.active_count()
    main = threading.main_thread().ident or 0

    def program(rank: int) -> None:
        if rank == 0:
            signal.pthread_kill(main, signal.SIGINT)
        while True:
            pass

    start_s = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        engine.run(program, world_size=2, timeout_s=20)
    assert time.perf_counter() - start_s < 5
    assert usable(engine) and threading.active_count() <= before + 3


def test_a_run_within_a_run_is_refused(engine: InprocEngine) -> None:
    error = ended(engine, lambda rank: engine.run(raises, world_size=1), world_size=1)
    assert isinstance(error.__cause__, RequestError)
    text = "run: another in-process run is active in this process; legal: one run at a time"
    assert str(error.__cause__) == text


def test_calls_from_threads_that_no_rank_started_and_after_the_run_are_refused(engine: InprocEngine) -> None:
    groups: queue.Queue[Any] = queue.Queue()
    refused: list[str] = []

    def call() -> None:
        try:
            groups.get().barrier()
        except RuntimeError as problem:
            refused.append(str(problem))

    thread = threading.Thread(target=call, name="helper")
    thread.start()

    def program(rank: int) -> Any:
        groups.put(dist.group.WORLD)
        thread.join()
        return dist.group.WORLD

    (group,) = engine.run(program, world_size=1)
    rule = "the in-process engine takes calls from the rank's own threads only, while the run lasts"
    assert refused == [f"barrier on rank 0: {rule}; this is thread 'helper'"]
    with pytest.raises(RuntimeError, match="takes calls from the rank's own threads only, while the run lasts"):
        group.barrier()
    error = ended(engine, lambda rank: group.barrier(), world_size=1)
    assert type(error.__cause__) is RuntimeError


def test_a_message_between_two_ranks_is_told_with_peer_and_tag(engine: InprocEngine) -> None:
    error = ended(engine, out_of_step.tags_differ)
    file, first = "tests/harness/engines/out_of_step.py", out_of_step.tags_differ.__code__.co_firstlineno
    assert str(error).splitlines()[1:] == [
        f"  rank 0: waits in send #0 of world (0 1): float32 3 to rank 1 tag 7, at {file}:{first + 2} in tags_differ",
        f"  rank 1: waits in recv #0 of world (0 1): float32 3 from rank 0 tag 8, at {file}:{first + 4} in tags_differ",
    ]


SHARED = ThreadPoolExecutor(1)
LOCK = threading.Lock()


def _summed(value: float, group: Any = None) -> float:
    tensor = torch.full((2,), value)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def _in_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_and_executors_call_for_their_rank_and_have_its_groups_and_meshes(engine: InprocEngine) -> None:
    def program(rank: int) -> tuple[Any, ...]:
        group = dist.new_group([0, 2])
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        of_mesh = _in_thread(lambda: (dist.get_rank(), mesh.get_group().size(), mesh.get_local_rank()))
        twice = _in_thread(lambda: [_summed(rank), _summed(rank + 1), _in_thread(lambda: _summed(rank + 2))])
        with ThreadPoolExecutor(2) as executor:
            later = executor.submit(_summed, rank + 1)
            between = [_summed(1), later.result()]
            pair = executor.submit(_summed, rank, group).result() if rank != 1 else 2.0
        return of_mesh, twice, sorted(between), pair, SHARED.submit(dist.get_rank).result(), _summed(rank)

    for rank, found in enumerate(engine.run(program, world_size=3)):
        assert found == ((rank, 3, rank), [3.0, 6.0, 9.0], [3.0, 6.0], 2.0, rank, 3.0)


def test_a_backward_in_a_thread_and_the_phase_that_the_rank_is_in_are_its_own(engine: InprocEngine) -> None:
    def subject(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
        weight = torch.ones(2, requires_grad=True)
        _in_thread((weight * (dist.get_rank() + 1)).sum().backward)
        assert weight.grad is not None
        _in_thread(lambda: dist.all_reduce(weight.grad))
        return {"grad/weight": weight.grad}

    run = execute(Case.parse("mode=tp tp=2"), subject, engine, text="")
    assert [(event.rank, event.op, event.payload_bytes) for event in run.events] == [
        (0, "all_reduce", 8),
        (1, "all_reduce", 8),
    ]


def test_calls_that_a_rank_would_have_to_make_at_once_are_left_to_the_pool(engine: InprocEngine) -> None:
    def program(rank: int) -> None:
        group = dist.new_group([0, 1])
        thread = threading.Thread(target=_summed, args=(1.0, group), name="reducer")
        thread.start()
        if rank == 1:
            thread.join()
        dist.barrier()
        thread.join()

    with pytest.raises(NotComputed, match="rank 0 calls all_reduce in thread 'reducer' .*; legal: --engine pool"):
        engine.run(program, world_size=2)
    assert engine.run(lambda rank: _in_thread(lambda: _summed(rank)), world_size=2) == [1.0, 1.0]


def test_what_a_rank_waits_for_a_processor_is_no_part_of_the_limit(
    engine: InprocEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(rank: int) -> int:
        time.sleep(0.5)
        return rank

    def starved(of: Starvation) -> float:
        of.lost_s += 0.4
        return 0.4

    with pytest.raises(TimeLimit, match="no end within 0.3 s: rank 0 is blocked at"):
        engine.run(program, world_size=1, timeout_s=0.3)
    monkeypatch.setattr(Starvation, "look", starved)
    assert engine.run(program, world_size=1, timeout_s=0.3) == [0]
    with pytest.raises(TimeLimit) as caught:  # at LONGEST times the limit
        engine.run(lambda rank: time.sleep(3), world_size=1, timeout_s=0.1)
    rule = r"; the process had \S+ s of processor time in \S+ s and waited for a processor for \S+ s of them: "
    assert re.search(rf"{rule}the machine is busy; legal: --timeout 1$", caught.value.cause.split("; rank 0 is in")[0])


def test_a_rank_that_waits_for_a_lock_of_another_is_named_with_the_engine_that_works(engine: InprocEngine) -> None:
    def program(rank: int) -> None:
        with LOCK:
            dist.barrier()

    try:
        with pytest.raises(TimeLimit) as caught:
            engine.run(program, world_size=2, timeout_s=0.3)
    finally:
        if LOCK.locked():
            LOCK.release()
    assert caught.value.cause.startswith("no end within 0.3 s: rank 1 is blocked at ")
    assert "test_inproc_endings.py:" in caught.value.cause and "; legal: --engine pool" in caught.value.cause


def test_a_thread_that_was_interrupted_as_its_job_ended_runs_no_other_job() -> None:
    """Whoever ends a run interrupts threads that are slow to unwind, and one may have ended just then."""
    threads = RankThreads()
    (first,) = threads.take(1)
    first.begin("rank 0", lambda: do_nothing)
    assert first.wait_for_end(10) and first.reusable
    first.interrupt()
    threads.give_back([first])
    (second,) = threads.take(1)
    second.begin("rank 0", lambda: do_nothing)
    assert second.wait_for_end(10), "nobody runs the job"
    second.end()
