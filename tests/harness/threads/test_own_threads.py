"""Threads that a rank starts are in its world; a rank that is blocked by another one outside of calls ends in time."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from harness.engines.threads.inproc import InprocEngine
from harness.errors import NotComputed, TimeLimit
from harness.running.ranks.execution import execute
from reference.case import Case

SHARED = ThreadPoolExecutor(1)
LOCK = threading.Lock()


def _summed(value: float, group: Any = None) -> float:
    tensor = torch.full((2,), value)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def _in_thread(function: Callable[[], Any]) -> Any:
    """Result of a function in a thread of its own."""
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
    assert "test_own_threads.py:" in caught.value.cause and "; legal: --engine pool" in caught.value.cause
