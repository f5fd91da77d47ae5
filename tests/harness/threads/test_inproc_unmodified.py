"""Unmodified parallel code in the in-process engine gives what one process gives: torch's own wrappers and layers."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness.engines.threads.inproc import InprocEngine

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own use of torch.jit, at import
    from torch.distributed.optim import ZeroRedundancyOptimizer


@pytest.fixture(autouse=True)
def everything_was_waited_for(engine: InprocEngine) -> Iterator[None]:
    """torch's own code waits for each of its works, in Python, in C++ or through a future."""
    yield
    assert engine.unwaited == ()


class Block(nn.Module):
    """A residual MLP with a norm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, width]."""
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y


def model() -> nn.Sequential:
    """Weights that are the same at every call, in float64."""
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block()).double()


def batch(rows: int = 4) -> Tensor:
    return torch.randn(rows, 6, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def assert_gradients(results: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for gradients in results:
        assert gradients.keys() == expected.keys()
        assert all(close(gradients[name], expected[name]) for name in expected)


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> dict[str, Tensor]:
    """The parameters after three steps."""
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return {name.removeprefix("module."): p.detach() for name, p in net.named_parameters()}


def test_ddp_starts_from_the_weights_of_rank_0(engine: InprocEngine) -> None:
    def program(rank: int) -> Tensor:
        torch.manual_seed(rank)
        weight: Tensor = DistributedDataParallel(nn.Linear(3, 2)).module.weight
        return weight.detach()

    torch.manual_seed(0)
    expected = nn.Linear(3, 2).weight
    assert all(torch.equal(weight, expected) for weight in engine.run(program, world_size=3))


def test_zero_redundancy_optimizer(engine: InprocEngine) -> None:
    x = batch()

    def program(rank: int) -> dict[str, Tensor]:
        net = model()
        return trained(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01), x)

    net = model()
    expected = trained(net, torch.optim.AdamW(net.parameters(), lr=0.01), x)
    assert_gradients(engine.run(program, world_size=3), expected)


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
        x = batch(1)[0].requires_grad_()
        weight = next(model().parameters()).detach().outer(torch.arange(16.0).double() - 8).requires_grad_()
        dist.barrier()
        y = checkpoint(half, x, weight, use_reentrant=reentrant) if recompute else half(x, weight)
        dist.barrier()
        y.square().sum().backward()
        assert weight.grad is not None
        return y.detach(), weight.grad

    plain = engine.run(program, False, world_size=3)
    recomputed = engine.run(program, True, world_size=3)
    for one, other in zip(plain, recomputed, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert one[0].count_nonzero() < one[0].numel()
