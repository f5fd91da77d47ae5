"""Calls and groups of the in-process engine: promises that gloo leaves open, and the events of an observer.

torch's wrappers are subjects of `bench/systems.txt`, whose quick cells are tests.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group, split_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import RankRaised
from shardproof.harness.ledger import Call
from tests.harness.engines import programs
from tests.harness.engines.out_of_step import ones
from tests.harness.engines.programs import Log, gather_flat
from tests.harness.own_words import Reduced
from tests.harness.threads.torch_calls.messages import summed

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def noise(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(257, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("op", "by_hand", "world_size"),
    [("SUM", operator.add, 4), ("PRODUCT", operator.mul, 3), ("MIN", torch.minimum, 2), ("MAX", torch.maximum, 1)],
)
def test_reductions_are_in_rank_order_and_rounded_every_time(
    engine: InprocEngine, op: str, by_hand: Callable[[Tensor, Tensor], Tensor], world_size: int
) -> None:
    def program(rank: int) -> list[Tensor]:
        tensors = [noise(rank, dtype) for dtype in DTYPES]
        for tensor in tensors:
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        return tensors

    every = [[noise(rank, dtype) for rank in range(world_size)] for dtype in DTYPES]
    expected = [functools.reduce(by_hand, tensors) for tensors in every]
    for tensors in engine.run(program, world_size=world_size):
        assert all(map(torch.equal, tensors, expected))
    if op == "SUM":
        exact = torch.stack([noise(rank, torch.bfloat16).float() for rank in range(4)]).sum(0).bfloat16()
        assert not torch.equal(exact, expected[2]), "one rounding at the end is another sum"


def test_two_hundred_and_fifty_six_ranks(engine: InprocEngine) -> None:
    assert engine.run(programs.summed, world_size=256) == [programs.total(256)] * 256


def value(rank: int) -> Tensor:
    return torch.arange(4.0) + 10 * rank


def test_a_rank_sends_to_itself(engine: InprocEngine) -> None:
    def program(rank: int) -> Tensor:
        found = torch.empty(4)
        works: list[Any] = [dist.isend(value(rank), dst=rank), dist.irecv(found, src=rank)]
        for work in works:
            work.wait()
        return found

    assert all(torch.equal(found, value(rank)) for rank, found in enumerate(engine.run(program, world_size=2)))


def test_meta_tensors_pass_through_every_collective(engine: InprocEngine) -> None:
    def program(rank: int) -> list[str]:
        with torch.device("meta"):
            x, full = torch.empty(4), torch.empty(8)
            dist.all_reduce(x)
            dist.broadcast(x, src=0)
            gather_flat(full, x)
            dist.all_to_all_single(torch.empty(4), x)
            dist.reduce_scatter(x, [torch.empty(4), torch.empty(4)])
        return [x.device.type, full.device.type]

    assert engine.run(program, world_size=2) == [["meta", "meta"]] * 2


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inference", [False, True])
def test_the_modes_of_whoever_computes_for_all_do_not_see_the_computing(engine: InprocEngine, inference: bool) -> None:
    """Selective checkpointing counts operators: one more on the rank that happens to come last would break it."""

    def program(rank: int) -> list[str]:
        with torch.inference_mode(inference):
            tensor = value(rank)
        seen = Seen()
        with seen, torch.inference_mode(inference):
            tensor.add_(1)
            dist.all_reduce(tensor)
        return seen.names

    assert engine.run(program, world_size=3) == [["add_.Tensor"]] * 3


def test_a_tensor_that_autograd_saved_must_not_be_overwritten_by_a_collective(engine: InprocEngine) -> None:
    """Stricter than gloo and NCCL, which give a wrong gradient without a word."""

    def program(rank: int) -> str:
        x = value(rank).requires_grad_()
        y = x.exp()
        dist.all_reduce(y.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        return "refused"

    assert engine.run(program, world_size=2) == ["refused", "refused"]


def test_split_groups_count_ranks_within_the_parent(engine: InprocEngine) -> None:
    def program(rank: int) -> tuple[float, float | None]:
        half = split_group(split_ranks=[[0, 2], [1, 3]])
        single = split_group(half, [[1]], group_desc="second")
        return summed(half), None if single is None else summed(single)

    assert engine.run(program, world_size=4) == [(5, None), (10, None), (5, 4), (10, 8)]


def test_a_wrong_split_is_refused_with_the_rule(engine: InprocEngine) -> None:
    with pytest.raises(RankRaised) as caught:
        engine.run(lambda rank: split_group(split_ranks=[[0, 5]]), world_size=2)
    rule = "must be lists of distinct ranks below 2, none of them empty; legal: [[0], [1]]"
    text = f"split_group split_ranks=[[0, 5]]: {rule}"
    assert isinstance(caught.value.__cause__, ValueError) and str(caught.value.__cause__) == text


def test_meshes_and_sharding_decisions_are_made_anew_in_every_run(engine: InprocEngine) -> None:
    """Group names count from 0 in every run: a mesh remembered from the first run would talk in the wrong group."""

    def program(rank: int, first: list[int]) -> float:
        dist.new_group(first)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = distribute_tensor(torch.arange(8.0), mesh["b"], [Shard(0)])
        return float((x * 2).sum().full_tensor())  # type: ignore[attr-defined]

    for first in ([0, 3], [1, 2], [0, 1, 2]):
        assert engine.run(program, first, world_size=4) == [56.0] * 4


def test_meshes_of_different_ranks_are_told_apart_where_shards_are_uneven(engine: InprocEngine) -> None:
    """torch keeps what a redistribution does in tables of the process, which the meshes of all ranks would share."""
    full = torch.arange(35.0).view(5, 7)

    def program(rank: int) -> tuple[bool, ...]:
        mesh = init_device_mesh("cpu", (2, 2))
        there = distribute_tensor(full, mesh, [Shard(0), Shard(0)]).redistribute(mesh, [Shard(1), Replicate()])
        back = there.redistribute(mesh, [Shard(0), Shard(1)])
        return torch.equal(there.full_tensor(), full), torch.equal(back.full_tensor(), full)

    assert engine.run(program, world_size=4) == [(True, True)] * 4


def test_user_code_may_initialise_and_destroy_the_world_itself(engine: InprocEngine) -> None:
    def program(rank: int) -> list[Any]:
        init_process_group("nccl", world_size=2, rank=rank)
        first = summed(None)
        destroy_process_group()
        gone = dist.is_initialized()
        dist.init_process_group(init_method="env://")
        group = dist.new_group([0, 1])
        dist.destroy_process_group(group)
        return [first, gone, summed(None), dist.get_rank()]

    assert engine.run(program, world_size=2) == [[3, False, 3, 0], [3, False, 3, 1]]


def told(call: Call) -> tuple[Any, ...]:
    return call.op, call.reduce_op, call.dtype, call.shapes, call.payload_bytes, call.is_async, call.peer


def test_messages_name_their_peer_and_only_the_blocking_ones_are_synchronous(engine: InprocEngine) -> None:
    def program(rank: int) -> None:
        group = dist.new_group([1, 2], group_desc="pair")
        if rank == 1:
            dist.send(ones(3), dst=2, group=group)
            dist.isend(ones(3), dst=2).wait()  # type: ignore[union-attr]
        if rank == 2:
            dist.recv(ones(3), src=1, group=group)
            dist.recv(ones(3))

    log = Log()
    engine.run(program, world_size=3, observer=log)
    assert [told(call) for call in log.of(1)] == [
        ("send", "", "float32", ((3,),), 12, False, 2),
        ("send", "", "float32", ((3,),), 12, True, 2),
    ]
    assert [told(call) for call in log.of(2)] == [
        ("recv", "", "float32", ((3,),), 12, False, 1),
        ("recv", "", "float32", ((3,),), 12, False, -1),
    ]
    assert [(call.group, call.group_desc) for call in log.of(2)] == [((1, 2), "pair"), ((0, 1, 2), "default_pg")]


def test_an_error_of_the_observer_ends_the_run(engine: InprocEngine) -> None:
    class Broken(Log):
        def on_issue(self, rank: int, call: Call) -> int:
            raise LookupError("no ledger")

    with pytest.raises(Exception, match="rank 0 of 2 raised LookupError: no ledger"):
        engine.run(lambda rank: dist.barrier(), world_size=2, observer=Broken())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_collectives_and_dropout(engine: InprocEngine, reentrant: bool) -> None:
    def half(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = nn.functional.dropout(torch.tanh(Reduced.apply(x @ weight, dist.group.WORLD)), 0.5)
        return y

    def program(rank: int, recompute: bool) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 48).view(6, 8).requires_grad_()
        weight = torch.linspace(-2, 3, 128).view(8, 16).requires_grad_()
        dist.barrier()
        y = checkpoint(half, x, weight, use_reentrant=reentrant) if recompute else half(x, weight)
        dist.barrier()
        y.square().sum().backward()
        assert weight.grad is not None
        return y.detach(), weight.grad

    plain, recomputed = (engine.run(program, recompute, world_size=3) for recompute in (False, True))
    for one, other in zip(plain, recomputed, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert one[0].count_nonzero() < one[0].numel()
