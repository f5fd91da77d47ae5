"""Ranks that raise, hang, or misuse the in-process engine: one error of the right branch, and the engine goes on."""

import queue
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.engines.threads.inproc import InprocEngine
from harness.errors import RankRaised, RequestError, TimeLimit
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
