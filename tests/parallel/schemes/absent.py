"""What a rank is left with when a collective is not issued: tensors of the right shape, made of its own data alone.

One stand-in for every raw collective of `parallel.communication.collectives`, with the same signature. Shapes stay
right, so that a removed call is a silent bug, as in real systems, and not a crash.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.communication.collectives import Pending
from parallel.communication.mesh import Axis

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_reduce_scatter",
]


def all_reduce(x: Tensor, axis: Axis, *, op: str = "sum") -> Tensor:
    """This rank's own term."""
    return x.clone() if axis.size > 1 else x


def start_all_reduce(x: Tensor, axis: Axis, *, op: str = "sum", overlap: bool = True) -> Pending:
    """This rank's own term, at once."""
    return Pending(None, lambda: x)


def all_gather(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """This rank's part in every place."""
    return torch.cat([x] * axis.size, dim) if axis.size > 1 else x


def start_all_gather(x: Tensor, axis: Axis, *, dim: int, overlap: bool = True) -> Pending:
    """This rank's part in every place, at once."""
    return Pending(None, lambda: all_gather(x, axis, dim=dim))


def reduce_scatter(x: Tensor, axis: Axis, *, dim: int, op: str = "sum") -> Tensor:
    """This rank's part of its own term."""
    return x.chunk(axis.size, dim)[axis.rank].contiguous()


def start_reduce_scatter(x: Tensor, axis: Axis, *, dim: int, op: str = "sum", overlap: bool = True) -> Pending:
    """This rank's part of its own term, at once."""
    return Pending(None, lambda: reduce_scatter(x, axis, dim=dim))


def all_to_all(x: Tensor, axis: Axis, *, split_dim: int, gather_dim: int) -> Tensor:
    """The part that was meant for this rank, in every place."""
    return torch.cat([x.chunk(axis.size, split_dim)[axis.rank]] * axis.size, gather_dim)


def start_all_to_all(x: Tensor, axis: Axis, *, split_dim: int, gather_dim: int, overlap: bool = True) -> Pending:
    """The part that was meant for this rank in every place, at once."""
    return Pending(None, lambda: all_to_all(x, axis, split_dim=split_dim, gather_dim=gather_dim))


def broadcast(x: Tensor, axis: Axis) -> Tensor:
    """What lies in this rank's buffer: its own tensor on the first rank, zeros elsewhere."""
    return x if axis.rank == 0 else torch.zeros_like(x)
