"""Every call of torch.distributed in the in-process engine, compared with its definition from all ranks' inputs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed.distributed_c10d import _coalescing_manager

from harness.engines.threads.inproc import InprocEngine

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
WORLDS = (1, 2, 3, 4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


@pytest.fixture(scope="module")
def engine() -> Iterator[InprocEngine]:
    with InprocEngine() as made:
        yield made


def own(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A rank's input: small whole numbers, different on every rank and in every place."""
    draw = torch.Generator().manual_seed(100 + rank)
    return torch.randint(1, 6, shape, generator=draw).to(dtype)


def in_rank_order(step: Callable[[Tensor, Tensor], Tensor], world_size: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """The definition of a reduction: ((t0 op t1) op t2) ..., rounded to the dtype after every step."""
    return functools.reduce(step, [own(rank, *shape, dtype=dtype) for rank in range(world_size)])


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


REDUCTIONS = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_all_reduce_is_the_reduction_in_rank_order_in_every_dtype(
    engine: InprocEngine, op: str, world_size: int
) -> None:
    bitwise = op.startswith("B")
    dtypes = [dtype for dtype in DTYPES if not (bitwise and dtype.is_floating_point)]

    def program(rank: int) -> list[Tensor]:
        tensors = [own(rank, 3, 2, dtype=dtype) for dtype in dtypes]
        for i, tensor in enumerate(tensors):
            work = dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), async_op=i % 2 == 0)
            if work is not None:
                work.wait()
        return tensors

    expected = [in_rank_order(REDUCTIONS[op], world_size, 3, 2, dtype=dtype) for dtype in dtypes]
    for tensors in engine.run(program, world_size=world_size):
        assert all(map(same, tensors, expected))


@pytest.mark.parametrize("world_size", WORLDS)
def test_averages_and_scaled_sums(engine: InprocEngine, world_size: int) -> None:
    def program(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        mean, whole, scaled = own(rank, 5), own(rank, 5, dtype=torch.int32), own(rank, 5)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        dist.all_reduce(whole, op=dist.ReduceOp.AVG)
        dist.all_reduce(scaled, op=_make_nccl_premul_sum(0.5))
        return mean, whole, scaled

    total = in_rank_order(operator.add, world_size, 5, dtype=torch.float64)
    for mean, whole, scaled in engine.run(program, world_size=world_size):
        assert same(mean, total / world_size)
        assert same(whole, (total / world_size).to(torch.int32))
        assert same(scaled, total * 0.5)


def test_bool_and_complex_tensors(engine: InprocEngine) -> None:
    def program(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        flags = torch.tensor([rank == 0, rank == 1, False])
        parts = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
        gathered = torch.empty(6, dtype=torch.bool)
        all_gather_single(gathered, flags)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        dist.all_reduce(parts)
        return flags, parts, gathered

    for flags, parts, gathered in engine.run(program, world_size=2):
        assert flags.tolist() == [True, True, False]
        assert parts.tolist() == [3 + 6j, 9 - 3j]
        assert gathered.tolist() == [True, False, False, False, True, False]


def test_sums_of_bfloat16_are_rounded_after_every_step_and_equal_bit_for_bit_on_all_ranks(engine: InprocEngine) -> None:
    def noise(rank: int) -> Tensor:
        return torch.randn(257, generator=torch.Generator().manual_seed(rank)).bfloat16()

    def program(rank: int) -> Tensor:
        tensor = noise(rank)
        dist.all_reduce(tensor)
        return tensor

    results = engine.run(program, world_size=4)
    expected = functools.reduce(operator.add, map(noise, range(4)))
    assert all(same(result, expected) for result in results)
    assert not same(expected, sum(noise(rank).float() for rank in range(4)).bfloat16())  # type: ignore[union-attr]


@pytest.mark.parametrize("world_size", WORLDS)
def test_rooted_collectives_for_every_root(engine: InprocEngine, world_size: int) -> None:
    def program(rank: int, root: int) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
        spread, total, part = own(rank, 4), own(rank, 4), torch.empty(2, dtype=torch.float64)
        dist.broadcast(spread, src=root)
        dist.reduce(total, dst=root)
        gathered = [torch.empty(4, dtype=torch.float64) for _ in range(world_size)] if rank == root else None
        dist.gather(own(rank, 4), gathered, dst=root)
        parts = [own(10 + i, 2) for i in range(world_size)] if rank == root else None
        dist.scatter(part, parts, src=root)
        return spread, total, gathered or [], part

    for root in range(world_size):
        for rank, (spread, total, gathered, part) in enumerate(engine.run(program, root, world_size=world_size)):
            assert same(spread, own(root, 4))
            is_root = rank == root
            reduced = in_rank_order(operator.add, world_size, 4, dtype=torch.float64)
            assert same(total, reduced if is_root else own(rank, 4))
            assert len(gathered) == (world_size if is_root else 0)
            assert all(same(tensor, own(i, 4)) for i, tensor in enumerate(gathered))
            assert same(part, own(10 + rank, 2))


@pytest.mark.parametrize("world_size", WORLDS)
def test_gathers_and_reduce_scatters(engine: InprocEngine, world_size: int) -> None:
    def program(rank: int) -> dict[str, Any]:
        listed = [torch.empty(2, 3, dtype=torch.float64) for _ in range(world_size)]
        uneven = [torch.empty(i + 1, dtype=torch.float64) for i in range(world_size)]
        joined = torch.empty(2 * world_size, 3, dtype=torch.float64)
        stacked = torch.empty(world_size, 2, 3, dtype=torch.float64)
        dist.all_gather(listed, own(rank, 2, 3))
        dist.all_gather(uneven, own(rank, rank + 1))
        all_gather_single(joined, own(rank, 2, 3))
        work = all_gather_single(stacked, own(rank, 2, 3), async_op=True)
        part, single = torch.empty(2, dtype=torch.float64), torch.empty(2, 3, dtype=torch.float64)
        dist.reduce_scatter(part, [own(rank + 10 * i, 2) for i in range(world_size)])
        reduce_scatter_single(single, own(rank, 2 * world_size, 3), op=dist.ReduceOp.MAX)
        work.wait()
        return {
            "listed": listed,
            "uneven": uneven,
            "joined": joined,
            "stacked": stacked,
            "part": part,
            "single": single,
        }

    for rank, found in enumerate(engine.run(program, world_size=world_size)):
        every = [own(other, 2, 3) for other in range(world_size)]
        assert all(map(same, found["listed"], every))
        assert all(same(tensor, own(i, i + 1)) for i, tensor in enumerate(found["uneven"]))
        assert same(found["joined"], torch.cat(every))
        assert same(found["stacked"], torch.stack(every))
        assert same(found["part"], sum(own(other + 10 * rank, 2) for other in range(world_size)))  # type: ignore[arg-type]
        full = in_rank_order(torch.maximum, world_size, 2 * world_size, 3, dtype=torch.float64)
        assert same(found["single"], full.chunk(world_size)[rank])


@pytest.mark.parametrize("world_size", WORLDS)
def test_all_to_all_even_uneven_and_of_lists(engine: InprocEngine, world_size: int) -> None:
    def rows(sender: int, receiver: int) -> int:
        return (sender + 2 * receiver) % 3

    def program(rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        peers = range(world_size)
        even = torch.empty(2 * world_size, 3, dtype=torch.float64)
        dist.all_to_all_single(even, own(rank, 2 * world_size, 3))
        sends, receives = [rows(rank, other) for other in peers], [rows(other, rank) for other in peers]
        uneven = torch.empty(sum(receives), 3, dtype=torch.float64)
        dist.all_to_all_single(uneven, own(rank, sum(sends), 3), receives, sends)
        listed = [torch.empty(rank + 1, other + 1, dtype=torch.float64) for other in peers]
        dist.all_to_all(listed, [own(rank, other + 1, rank + 1) for other in peers])
        return even, uneven, listed

    for rank, (even, uneven, listed) in enumerate(engine.run(program, world_size=world_size)):
        peers = range(world_size)
        assert same(even, torch.cat([own(other, 2 * world_size, 3)[2 * rank : 2 * rank + 2] for other in peers]))
        blocks = []
        for other in peers:
            sends = [rows(other, receiver) for receiver in peers]
            blocks.append(own(other, sum(sends), 3).split(sends)[rank])
        assert same(uneven, torch.cat(blocks))
        assert all(same(listed[other], own(other, rank + 1, other + 1)) for other in peers)


@pytest.mark.parametrize("is_async", [False, True])
def test_coalescing_blocks_and_coalesced_functions(engine: InprocEngine, is_async: bool) -> None:
    def block(call: Callable[..., Any], *arguments: Sequence[Tensor], **words: Any) -> None:
        """Issue `call` on every row of the arguments within one block."""
        with _coalescing_manager(async_ops=is_async, **words) as manager:
            for row in zip(*arguments, strict=True):
                call(*row)
        if is_async:
            manager.wait()

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float64)

    def program(rank: int) -> dict[str, list[Any]]:
        reduced, sent = [own(rank, 3), own(rank + 10, 2, 2)], [own(rank, 2), own(rank, 3)]
        gathered, scattered = [empty(3, 2), empty(6)], [empty(2), empty(1)]
        more, lists = [own(rank, 2), own(rank, 4)], [[empty(2), empty(3)] for _ in range(3)]
        block(dist.all_reduce, reduced)
        block(all_gather_single, gathered, [own(rank, 2), own(rank + 10, 2)])
        block(reduce_scatter_single, scattered, [own(rank, 6), own(rank, 3)])
        block(functools.partial(dist.broadcast, src=2), sent, device=torch.device("cpu"))
        with pytest.warns(FutureWarning):
            futures = [
                dist.all_reduce_coalesced(more, async_op=is_async),
                dist.all_gather_coalesced(lists, [own(rank, 2), own(rank, 3)], async_op=is_async),
            ]
        for future in futures if is_async else []:
            future.wait()
        return {"reduced": reduced + more, "gathered": gathered, "scattered": scattered, "sent": sent, "lists": lists}

    def total(*shape: int, first: int = 0) -> Tensor:
        return own(first, *shape) + own(first + 1, *shape) + own(first + 2, *shape)

    for rank, found in enumerate(engine.run(program, world_size=3)):
        expected = [total(3), total(2, 2, first=10), total(2), total(4)]
        assert all(map(same, found["reduced"], expected))
        assert same(found["gathered"][0], torch.stack([own(other, 2) for other in range(3)]))
        assert same(found["gathered"][1], torch.cat([own(other + 10, 2) for other in range(3)]))
        assert same(found["scattered"][0], total(6)[2 * rank : 2 * rank + 2])
        assert same(found["scattered"][1], total(3)[rank : rank + 1])
        assert same(found["sent"][0], own(2, 2)) and same(found["sent"][1], own(2, 3))
        assert all(same(pair[0], own(i, 2)) and same(pair[1], own(i, 3)) for i, pair in enumerate(found["lists"]))


def test_runs_of_any_size_give_the_same_bits_every_time(engine: InprocEngine) -> None:
    def program(rank: int) -> Tensor:
        x = torch.randn(64) * (rank + 1)
        for _ in range(3):
            dist.all_reduce(x)
            x = torch.tanh(x) + rank
        return x

    for world_size in (8, 2, 5, 8):
        first, second = (engine.run(program, world_size=world_size) for _ in range(2))
        assert all(map(torch.equal, first, second))


def test_two_hundred_and_fifty_six_ranks(engine: InprocEngine) -> None:
    def program(rank: int) -> float:
        x = torch.full((2,), float(rank))
        dist.all_reduce(x)
        return x[0].item()

    assert engine.run(program, world_size=256) == [255 * 128.0] * 256
