"""Programs that go wrong on rank 1, each in one way, and one that goes right: what the fault table runs on an engine.

Programs whose ranks disagree about a call are in `bench.parted_programs`.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["exits", "goes_right", "hangs", "is_killed", "loops_forever", "raises", "raises_in_backward"]

ASLEEP_S = 20.0
"""How long the hanging rank sleeps: far beyond the limit of a run, yet not for ever where it cannot be ended."""


class _Failing(torch.autograd.Function):
    """Identity forward; the backward raises on rank 1 and sums the ranks' gradients elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The sum of the gradients, where it is reached."""
        if dist.get_rank() == 1:
            raise ValueError("bad gradient")
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def _sum() -> float:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return float(tensor[0])


def goes_right(rank: int) -> float:
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    return _sum()


def raises(rank: int) -> None:
    _sum()
    if rank == 1:
        raise ValueError("bad layer")
    _sum()


def raises_in_backward(rank: int) -> None:
    x = torch.ones(2, requires_grad=True)
    (_Failing.apply(x) * 2).sum().backward()


def exits(rank: int) -> None:
    _sum()
    if rank == 1:
        os._exit(9)
    _sum()


def is_killed(rank: int) -> None:
    _sum()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _sum()


def hangs(rank: int) -> None:
    _sum()
    if rank == 1:
        time.sleep(ASLEEP_S)
    _sum()


def loops_forever(rank: int) -> None:
    _sum()
    while rank == 1:
        pass
    _sum()
