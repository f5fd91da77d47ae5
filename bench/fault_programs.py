"""Programs that go wrong, each in one way, and one that goes right: what the fault table runs on an engine.

First those in which rank 1 ends, waits or raises; then those whose ranks disagree about a call. Two or three ranks.
"""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def skips(rank: int) -> None:
    dist.all_reduce(_ones(3))
    if rank != 1:
        dist.all_reduce(_ones(3))


def orders_differ(rank: int) -> None:
    calls = [lambda: dist.all_reduce(_ones(4)), lambda: dist.broadcast(_ones(4), src=0)]
    for call in reversed(calls) if rank == 2 else calls:
        call()


def numels_differ(rank: int) -> None:
    dist.all_reduce(_ones(4 if rank == 1 else 3))


def shapes_differ(rank: int) -> None:
    dist.all_reduce(_ones(2, 3) if rank == 1 else _ones(3, 2))


def dtypes_differ(rank: int) -> None:
    dist.all_reduce(_ones(3).int() if rank == 1 else _ones(3))


def reduce_ops_differ(rank: int) -> None:
    dist.all_reduce(_ones(3), op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)


def roots_differ(rank: int) -> None:
    dist.broadcast(_ones(3), src=1 if rank == 1 else 0)


def splits_differ(rank: int) -> None:
    sends, receives = [[1, 3], [2, 2]][rank], [[1, 2], [4, 2]][rank]
    dist.all_to_all_single(_ones(sum(receives)), _ones(sum(sends)), receives, sends)


def groups_cross(rank: int) -> None:
    one, other = dist.new_group([0, 1], group_desc="one"), dist.new_group([0, 1], group_desc="other")
    for group in (one, other) if rank == 0 else (other, one):
        dist.all_reduce(_ones(1), group=group)
