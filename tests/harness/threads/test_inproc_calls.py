"""What gloo leaves open and the in-process engine promises: reductions in rank order, the same bits in every run."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.engines.threads.inproc import InprocEngine

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def noise(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(257, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions_are_in_rank_order_and_rounded_after_every_step(
    engine: InprocEngine, op: str, world_size: int
) -> None:
    def program(rank: int) -> list[Tensor]:
        tensors = [noise(rank, dtype) for dtype in DTYPES]
        for tensor in tensors:
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        return tensors

    every = [[noise(rank, dtype) for rank in range(world_size)] for dtype in DTYPES]
    expected = [functools.reduce(REDUCTIONS[op], tensors) for tensors in every]
    for tensors in engine.run(program, world_size=world_size):
        assert all(map(torch.equal, tensors, expected))
    if op == "SUM" and world_size == 4:
        exact = torch.stack([noise(rank, torch.bfloat16).float() for rank in range(4)]).sum(0).bfloat16()
        assert not torch.equal(exact, expected[2]), "one rounding at the end is another sum"


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
