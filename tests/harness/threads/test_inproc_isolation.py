"""State that ranks of the in-process engine have to themselves, results of the caller, and that nothing stays.

Memory does not grow with the number of runs either: what runs have freed in pieces goes back to the system.
"""

import contextvars
import functools
import gc
import os
import random
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from harness.engines.threads import heap
from harness.engines.threads.heap import Heap, resident_bytes
from harness.engines.threads.inproc import InprocEngine
from harness.engines.threads.process_group import InprocGroup
from harness.errors import RankRaised

KEPT = threading.local()
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("CONTEXT", default=-1)


def streams() -> tuple[Any, ...]:
    """The state of the process's random streams, comparable."""
    numpy_state: Any = np.random.get_state()
    name, words, *rest = numpy_state
    return torch.default_generator.get_state().tolist(), random.getstate(), (name, words.tolist(), *rest)


def draw(times: int) -> list[float]:
    """Draws of every stream, normal ones too: numpy and Python keep the second of a pair for the next draw."""
    drawn: list[float] = []
    for _ in range(times):
        drawn += [
            torch.rand(1).item(),
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),
            float(np.random.randn()),
        ]
    return drawn


@pytest.mark.parametrize("seed", [0, 7, -1])
def test_every_rank_draws_its_own_stream_from_the_seed_however_they_take_turns(engine: InprocEngine, seed: int) -> None:
    def program(rank: int) -> list[float]:
        drawn: list[float] = []
        for turn in range(4):
            drawn += draw((rank + turn) % 3)
            dist.barrier()
        return drawn

    found = engine.run(program, world_size=3, seed=seed)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    longest = draw(5)
    assert [len(drawn) for drawn in found] == [15, 20, 25]
    assert all(drawn == longest[: len(drawn)] for drawn in found)
    assert engine.run(program, world_size=3, seed=seed) == found
    assert engine.run(program, world_size=3, seed=seed + 1) != found


@pytest.mark.parametrize("drawing", [(), ("torch",), ("python",), ("numpy",), ("torch", "python", "numpy")])
@pytest.mark.parametrize("half_drawn", [False, True])
def test_the_callers_streams_go_on_as_if_nothing_had_run(
    engine: InprocEngine, drawing: tuple[str, ...], half_drawn: bool
) -> None:
    def program(rank: int) -> None:
        for name in drawing:
            {"torch": lambda: torch.rand(3), "python": random.random, "numpy": np.random.randn}[name]()
        dist.barrier()

    draw(1 if half_drawn else 2)
    if half_drawn:
        random.gauss(0, 1), np.random.randn()
    before = streams()
    engine.run(program, world_size=2)
    assert streams() == before
    with pytest.raises(RankRaised):
        engine.run(lambda rank: 1 / 0 if rank else program(rank), world_size=2)
    assert streams() == before
    expected = [np.random.randn(), random.gauss(0, 1)]
    np.random.set_state(before[2])
    random.setstate(before[1])
    engine.run(program, world_size=2)
    assert [np.random.randn(), random.gauss(0, 1)] == expected
    before = streams()
    engine.run(program, world_size=2)
    assert streams() == before


def test_dropout_masks_are_equal_on_all_ranks_and_those_of_one_process(engine: InprocEngine) -> None:
    def program(rank: int) -> torch.Tensor:
        mask = torch.nn.functional.dropout(torch.ones(50), 0.5)
        dist.barrier()
        return torch.cat([mask, torch.nn.functional.dropout(torch.ones(50), 0.5)])

    torch.manual_seed(3)
    expected = torch.cat([torch.nn.functional.dropout(torch.ones(50), 0.5) for _ in range(2)])
    assert all(torch.equal(mask, expected) for mask in engine.run(program, world_size=4, seed=3))


def test_thread_state_that_a_program_leaves_behind_does_not_reach_the_next(engine: InprocEngine) -> None:
    def leave(rank: int) -> int:
        KEPT.value = rank
        CONTEXT.set(rank)
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        torch.autocast("cpu").__enter__()
        return threading.get_ident()

    def look(rank: int) -> tuple[Any, ...]:
        x = torch.ones(2)
        return (
            hasattr(KEPT, "value"),
            CONTEXT.get(),
            torch.is_grad_enabled(),
            x.device.type,
            torch.is_autocast_enabled("cpu"),
        )

    engine.run(leave, world_size=2)
    assert engine.run(look, world_size=3) == [(False, -1, True, "cpu", False)] * 3
    assert torch.is_grad_enabled() and torch.ones(1).device.type == "cpu"


def test_default_dtype_is_each_ranks_own_and_the_callers_afterwards(engine: InprocEngine) -> None:
    def program(rank: int) -> torch.dtype:
        if rank == 1:
            torch.set_default_dtype(torch.float64)
        dist.barrier()
        return torch.ones(1).dtype

    assert engine.run(program, world_size=2) == [torch.float32, torch.float64]
    assert torch.get_default_dtype() is torch.float32


def test_torch_uses_one_thread_during_a_run_and_as_many_as_before_afterwards(engine: InprocEngine) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert engine.run(lambda rank: torch.get_num_threads(), world_size=2) == [1, 1]
        assert engine.run(lambda rank: torch._C._is_multithreading_enabled(), world_size=2) == [False, False]
        assert torch.get_num_threads() == 2
        with pytest.raises(RankRaised):
            engine.run(lambda rank: 1 / 0, world_size=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_nothing_of_a_run_stays_alive_and_closing_ends_the_threads() -> None:
    def fail(rank: int) -> None:
        dist.barrier()
        raise ValueError(rank)

    def resharded(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        distribute_tensor(torch.ones(3, 5), mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])

    def groups() -> list[InprocGroup]:
        gc.collect()
        return [entry for entry in gc.get_objects() if type(entry) is InprocGroup]

    others = set(threading.enumerate())
    before = groups()  # what an earlier test's traceback still holds
    with InprocEngine() as engine:
        for _ in range(3):
            engine.run(resharded, world_size=2)
            engine.run(lambda rank: dist.new_group([0, 1]).size(), world_size=2)
            with pytest.raises(RankRaised):
                engine.run(fail, world_size=2)
        alive = [group for group in groups() if not any(group is earlier for earlier in before)]
        idle = [thread for thread in set(threading.enumerate()) - others if thread.name == "rank (idle)"]
        assert alive == [] and len(idle) == 2
    for thread in idle:
        thread.join(5)
        assert not thread.is_alive()


AFTERWARDS = """
import sys, threading
import torch, torch.distributed as dist
from harness.engines.threads.inproc import InprocEngine

def program(rank):
    x = torch.ones(2)
    dist.all_reduce(x, group=dist.new_group([0, 1]))
    return x[0].item()

with InprocEngine() as engine:
    rank = int(sys.argv[1])
    assert engine.run(program, world_size=2) == [2, 2]
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method="file://" + sys.argv[2], world_size=2, rank=rank)
    group = dist.new_group([0, 1])
    before = torch.full((2,), float(rank + 1))
    dist.all_reduce(before, group=group)
    assert engine.run(program, world_size=2) == [2, 2]
    assert dist.get_rank() == rank and dist.get_backend() == "gloo"
    functional, after = torch.ops._c10d_functional, []
    def by_name():
        after.extend(functional.wait_tensor(functional.all_reduce(before, "sum", group.group_name)).tolist())
    thread = threading.Thread(target=by_name)
    thread.start()
    thread.join()
    dist.destroy_process_group()
    assert engine.run(program, world_size=2) == [2, 2]
    print(before.tolist(), after)
"""


def test_real_process_groups_work_before_and_after_runs_in_the_same_process(tmp_path: Any) -> None:
    start = functools.partial(subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    command = [sys.executable, "-c", AFTERWARDS]
    processes = [start([*command, str(rank), str(tmp_path / "rendezvous")]) for rank in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [output.splitlines()[-1] for output in outputs] == ["[3.0, 3.0] [6.0, 6.0]"] * 2


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not place threads")
def test_ranks_share_a_processor_and_the_driver_keeps_its_own() -> None:
    before = os.sched_getaffinity(0)
    with InprocEngine() as engine:
        ranks = engine.run(lambda rank: os.sched_getaffinity(0), world_size=3)
    assert ranks[0] == ranks[1] == ranks[2]
    assert len(ranks[0]) == 1
    assert ranks[0] <= before
    assert os.sched_getaffinity(0) == before


PIECE_BYTES = 2**16
"""Below what glibc maps one by one and gives back by itself."""
keeps_holes = pytest.mark.skipif(
    not hasattr(heap._C, "malloc_trim"), reason="this C library keeps no holes to give back"
)


def holes(mib: int) -> torch.Tensor:
    """Allocate and free this many MiB, all but the last piece, which holds the heap's end where it is."""
    pieces = [torch.ones(PIECE_BYTES, dtype=torch.uint8) for _ in range(mib * 2**20 // PIECE_BYTES)]
    return pieces[-1]


@keeps_holes
def test_a_run_gives_back_what_was_freed_in_pieces() -> None:
    with InprocEngine() as engine:
        heap._C.malloc_trim(0)  # holes of earlier tests would be filled first
        before = resident_bytes()
        engine._heap = Heap(slack_bytes=2**24, every=1)
        kept = holes(64)
        assert resident_bytes() - before > 50 * 2**20, "glibc itself gives nothing back while the last piece lives"
        engine.run(lambda rank: None, world_size=2)
        assert resident_bytes() - before < 20 * 2**20
    assert kept.sum() == PIECE_BYTES


@keeps_holes
def test_what_is_in_use_is_not_asked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, trimmed = [100], list[int]()
    monkeypatch.setattr(heap, "resident_bytes", lambda: seen[0])
    monkeypatch.setattr(heap, "_C", type("C", (), {"malloc_trim": trimmed.append}))
    kept = Heap(slack_bytes=50, every=1)
    for now, times in ((150, 0), (151, 1), (200, 1), (201, 1), (202, 2), (100, 2)):
        seen[0] = now
        kept.settle()
        assert len(trimmed) == times, now
