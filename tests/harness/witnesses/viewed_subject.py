"""A subject whose layers change views of their input in place, which full backward hooks on modules refuse."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.protocols import CaseLike

WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A line of the closed form."""

    phase: str
    region: str
    payload_bytes: int
    calls: int = 1
    op: str = "all_reduce"
    reduce_op: str = "sum"
    axis: str = "tp"
    group_size: int = 2
    dtype: str = "float32"


class _Summed(torch.autograd.Function):
    """Sum over the ranks, forward and backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        del ctx
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        del ctx
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Halves(nn.Module):
    """Doubles one half of what comes in, in place, and sums over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """A view of a view, changed in place."""
        y: Tensor = self.linear(x)
        y.view(-1, 2, WIDTH // 2)[:, 0].mul_(2.0)
        summed: Tensor = _Summed.apply(y)
        summed[:, : WIDTH // 2].add_(1.0)
        return summed.view(-1, WIDTH)


def subject(case: CaseLike, device: torch.device) -> dict[str, Tensor]:
    """One forward and backward of two layers."""
    torch.manual_seed(case.seed)
    model = nn.Sequential(Halves(), Halves()).to(device)
    loss = model(torch.ones(3, WIDTH, device=device)).square().sum()
    loss.backward()
    return {"loss/0": loss, **{f"grad/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}}


def _expected(_case: CaseLike) -> Iterable[Term]:
    """Three rows of WIDTH floats, once forward and once backward in each layer."""
    payload_bytes = 3 * WIDTH * 4
    return [
        Term(phase=phase, region=region, payload_bytes=payload_bytes)
        for phase in ("forward", "backward")
        for region in ("0", "1")
    ]


subject.expected = _expected  # type: ignore[attr-defined]
