"""What an observer of the in-process engine is told: one Call a call, the contract's payload, the completion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager, _get_default_group

from harness.engines.engine import Unwaited
from harness.engines.threads.inproc import InprocEngine
from harness.ledger import Call
from tests.harness.engines.programs import Log

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def watched(program: Callable[[int], Any], world_size: int = 2) -> Log:
    log = Log()
    with InprocEngine() as engine:
        engine.run(program, world_size=world_size, observer=log)
    return log


def told(call: Call) -> tuple[Any, ...]:
    return call.op, call.reduce_op, call.dtype, call.shapes, call.payload_bytes, call.is_async, call.peer


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def collectives(rank: int) -> None:
    dist.all_reduce(ones(3, 2), op=dist.ReduceOp.MAX)
    work = dist.all_reduce(ones(2, 6)[:1], async_op=True)
    for _ in range(2):
        work.wait()
    dist.reduce(ones(2).bfloat16(), dst=1)
    dist.broadcast(ones(5).double(), src=1)
    all_gather_single(ones(2, 4), ones(4))
    reduce_scatter_single(ones(3), ones(6))
    dist.all_gather([ones(1), ones(1)], ones(1))
    dist.reduce_scatter(ones(1), [ones(1), ones(1)])
    dist.all_to_all_single(ones(4, 2), ones(4, 2))
    dist.all_to_all([ones(1), ones(1)], [ones(1), ones(1)])
    dist.gather(ones(3), [ones(3), ones(3)] if rank == 0 else None, dst=0)
    dist.scatter(ones(3), [ones(3), ones(3)] if rank == 0 else None, src=0)
    dist.barrier()
    dist.monitored_barrier()


def test_payloads_follow_the_contract_and_never_the_storage() -> None:
    log = watched(collectives)
    expected = [
        ("all_reduce", "max", "float32", ((3, 2),), 24, False, -1),
        ("all_reduce", "sum", "float32", ((1, 6),), 24, True, -1),
        ("reduce", "sum", "bfloat16", ((2,),), 4, False, 1),
        ("broadcast", "", "float64", ((5,),), 40, False, 1),
        ("all_gather", "", "float32", ((2, 4),), 32, False, -1),
        ("reduce_scatter", "sum", "float32", ((6,),), 24, False, -1),
        ("all_gather", "", "float32", ((1,), (1,)), 8, False, -1),
        ("reduce_scatter", "sum", "float32", ((1,), (1,)), 8, False, -1),
        ("all_to_all", "", "float32", ((4, 2),), 32, False, -1),
        ("all_to_all", "", "float32", ((1,), (1,)), 8, False, -1),
        ("gather", "", "float32", ((3,),), 12, False, 0),
        ("scatter", "", "float32", ((3,),), 12, False, 0),
        ("barrier", "", "", (), 0, False, -1),
        ("barrier", "", "", (), 0, False, -1),
    ]
    for rank in range(2):
        assert [told(call) for call in log.of(rank)] == expected
        assert {(call.group, call.group_desc) for call in log.of(rank)} == {((0, 1), "default_pg")}


def test_coalesced_calls_are_one_call_with_all_shapes_and_functional_ones_are_told_once() -> None:
    def program(rank: int) -> None:
        with _coalescing_manager():
            dist.all_reduce(ones(3))
            dist.all_reduce(ones(2, 2))
        with _coalescing_manager(async_ops=True) as manager:
            all_gather_single(ones(4), ones(2))
            all_gather_single(ones(8), ones(4))
        manager.wait()
        world = _get_default_group()
        functional.all_reduce(ones(2), "avg", world).sum()
        getattr(functional, "all_gather_single", functional.all_gather_tensor)(ones(2), 0, world).sum()
        getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)(ones(4), "sum", 0, world).sum()

    expected = [
        ("all_reduce", "sum", "float32", ((3,), (2, 2)), 28, False, -1),
        ("all_gather", "", "float32", ((4,), (8,)), 48, True, -1),
        ("all_reduce", "avg", "float32", ((2,),), 8, True, -1),
        ("all_gather", "", "float32", ((4,),), 16, True, -1),
        ("reduce_scatter", "sum", "float32", ((4,),), 16, True, -1),
    ]
    assert [told(call) for call in watched(program).of(1)] == expected


def test_messages_name_their_peer_and_only_the_blocking_ones_are_synchronous() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([1, 2], group_desc="pair")
        if rank == 1:
            dist.send(ones(3), dst=2, group=group)
            dist.isend(ones(3), dst=2).wait()  # type: ignore[union-attr]
        if rank == 2:
            dist.recv(ones(3), src=1, group=group)
            dist.recv(ones(3))

    log = watched(program, world_size=3)
    assert [told(call) for call in log.of(1)] == [
        ("send", "", "float32", ((3,),), 12, False, 2),
        ("send", "", "float32", ((3,),), 12, True, 2),
    ]
    assert [told(call) for call in log.of(2)] == [
        ("recv", "", "float32", ((3,),), 12, False, 1),
        ("recv", "", "float32", ((3,),), 12, False, -1),
    ]
    assert [(call.group, call.group_desc) for call in log.of(2)] == [((1, 2), "pair"), ((0, 1, 2), "default_pg")]


def test_works_that_nobody_waited_for_are_listed_and_still_completed() -> None:
    def program(rank: int) -> None:
        waited = dist.all_reduce(ones(2), async_op=True)
        if rank == 1:
            dist.all_reduce(ones(2), async_op=True)
        else:
            dist.all_reduce(ones(2))
        functional.all_reduce(ones(2), "sum", _get_default_group()).sum()
        assert waited is not None
        waited.wait()

    log = Log()
    with InprocEngine() as engine:
        engine.run(program, world_size=2, observer=log)
        (left,) = engine.unwaited
        assert left == Unwaited(rank=1, op="all_reduce", number=1, group="world (0 1)", caller=left.caller)
        assert left.caller.endswith(f"test_inproc_observer.py:{program.__code__.co_firstlineno + 3}")
        assert sorted(ticket for _, ticket in log.completions) == list(range(6))
        engine.run(lambda rank: dist.barrier(), world_size=2)
        assert engine.unwaited == ()


def test_an_error_of_the_observer_ends_the_run() -> None:
    class Broken(Log):
        def issued(self, rank: int, call: Call) -> int:
            raise LookupError("no ledger")

    with InprocEngine() as engine, pytest.raises(Exception, match="rank 0 of 2 raised LookupError: no ledger"):
        engine.run(lambda rank: dist.barrier(), world_size=2, observer=Broken())
