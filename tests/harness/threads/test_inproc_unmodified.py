"""Unmodified parallel code in the in-process engine: DDP's first broadcast, checkpoints with collectives and dropout.

torch's other wrappers are subjects of `bench/systems.txt`, whose quick cells are tests.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness.engines.threads.inproc import InprocEngine


def test_ddp_starts_from_the_weights_of_rank_0(engine: InprocEngine) -> None:
    def program(rank: int) -> Tensor:
        torch.manual_seed(rank)
        weight: Tensor = DistributedDataParallel(nn.Linear(3, 2)).module.weight
        return weight.detach()

    torch.manual_seed(0)
    expected = nn.Linear(3, 2).weight
    assert all(torch.equal(weight, expected) for weight in engine.run(program, world_size=3))
    assert engine.unwaited == ()


class _Summed(torch.autograd.Function):
    """all_reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_collectives_and_dropout(engine: InprocEngine, reentrant: bool) -> None:
    def half(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = nn.functional.dropout(torch.tanh(_Summed.apply(x @ weight)), 0.5)
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
