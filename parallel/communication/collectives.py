"""The raw collectives on one axis, along any dim of any tensor, contiguous or not. No autograd: see `pairs`.

A group of one rank is bypassed, except in `broadcast` (Megatron broadcasts its batch there too). `start_*` return a
`Pending`; with `overlap=False` the same call is issued and awaited at once. Payloads are those of modes.md section 1.
Parts along a gathered dim follow the order of `axis.ranks`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.parallel.communication.layout import Axis

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "avg": dist.ReduceOp.AVG}
# torch 2.13 gives the flat collectives new names and deprecates the old ones; 2.11 and 2.12 know the old ones only.
_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective under way. `wait()` must be called once before the result is used; it returns the result."""

    work: Any
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """The result, complete on this rank."""
        if self.work is not None:
            self.work.wait()
        return self.finish()


def own_slice(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """This rank's equal part of `x` along `dim`, contiguous; no communication."""
    if axis.size == 1:
        return x
    width = _share(x, axis, dim)
    return x.narrow(dim, axis.rank * width, width).contiguous()


def all_reduce(x: Tensor, axis: Axis, *, op: str = "sum") -> Tensor:
    """The reduction of every rank's `x`, as a new tensor; `x` itself in a group of one rank."""
    if axis.size == 1:
        return x
    return start_all_reduce(x.clone(memory_format=torch.contiguous_format), axis, op=op, overlap=False).wait()


def start_all_reduce(x: Tensor, axis: Axis, *, op: str = "sum", overlap: bool = True) -> Pending:
    """Begin to reduce `x`, which the caller gives away: the reduction may overwrite it. Use what `wait()` returns."""
    if axis.size == 1:
        return Pending(None, lambda: x)
    # The collective works in place: of a non-contiguous tensor it would reduce a copy, so that copy is the result.
    buffer = x.contiguous()
    return Pending(dist.all_reduce(buffer, _REDUCE_OPS[op], axis.group, async_op=overlap), lambda: buffer)


def all_gather(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Every rank's `x`, concatenated along `dim`."""
    return start_all_gather(x, axis, dim=dim, overlap=False).wait()


def start_all_gather(x: Tensor, axis: Axis, *, dim: int, overlap: bool = True) -> Pending:
    """Begin to concatenate every rank's `x` along `dim`."""
    if axis.size == 1:
        return Pending(None, lambda: x)
    gathered = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    # The flat collective concatenates along dim 0 of memory; `_join` moves the parts to the dim that was asked for.
    work = _gather_flat(gathered, x.contiguous(), group=axis.group, async_op=overlap)
    return Pending(work, lambda: _join(gathered, axis, dim))


def reduce_scatter(x: Tensor, axis: Axis, *, dim: int, op: str = "sum") -> Tensor:
    """This rank's equal part along `dim` of the reduction of every rank's `x`."""
    return start_reduce_scatter(x, axis, dim=dim, op=op, overlap=False).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, *, dim: int, op: str = "sum", overlap: bool = True) -> Pending:
    """Begin to reduce every rank's `x` and to keep this rank's equal part along `dim`."""
    if axis.size == 1:
        return Pending(None, lambda: x)
    parts = _split(x, axis, dim)
    own = x.new_empty((parts.shape[0] // axis.size, *parts.shape[1:]))
    work = _reduce_scatter_flat(own, parts, _REDUCE_OPS[op], group=axis.group, async_op=overlap)
    return Pending(work, lambda: own)


def all_to_all(x: Tensor, axis: Axis, *, split_dim: int, gather_dim: int) -> Tensor:
    """Part i of `x` along `split_dim` goes to rank i; the parts received are concatenated along `gather_dim`."""
    return start_all_to_all(x, axis, split_dim=split_dim, gather_dim=gather_dim, overlap=False).wait()


def start_all_to_all(x: Tensor, axis: Axis, *, split_dim: int, gather_dim: int, overlap: bool = True) -> Pending:
    """Begin to send part i of `x` along `split_dim` to rank i and to concatenate what arrives along `gather_dim`."""
    if axis.size == 1:
        return Pending(None, lambda: x)
    parts = _split(x, axis, split_dim)
    received = torch.empty_like(parts)
    work = dist.all_to_all_single(received, parts, group=axis.group, async_op=overlap)
    return Pending(work, lambda: _join(received, axis, gather_dim))


def exchange(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send `sent[i]` rows of `x`, in order, to rank i; return the `received[i]` rows from each rank i, in order.

    In a group of one rank that is `x` itself.
    """
    if axis.size == 1:
        return x
    arriving = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(arriving, x.contiguous(), list(received), list(sent), group=axis.group)
    return arriving


def broadcast(x: Tensor, axis: Axis) -> Tensor:
    """The `x` of the axis's first rank; issued in a group of one too. A contiguous `x` is overwritten in place."""
    buffer = x.contiguous()
    dist.broadcast(buffer, axis.ranks[0], axis.group)
    return buffer


def _share(x: Tensor, axis: Axis, dim: int) -> int:
    """Length of one rank's equal part of `x` along `dim`."""
    share, rest = divmod(x.shape[dim], axis.size)
    if rest:
        raise ValueError(
            f"dim={dim}: its length {x.shape[dim]} must be a multiple of the {axis.size} ranks of axis {axis.name}; "
            f"legal: {(share + 1) * axis.size}"
        )
    return share


def _split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """`x` cut along `dim` into parts that follow each other along dim 0 of a contiguous tensor."""
    dim = dim % x.dim()
    width = _share(x, axis, dim)
    parts: Tensor = x.unflatten(dim, (axis.size, width)).movedim(dim, 0)
    return parts.flatten(0, 1).contiguous()


def _join(parts: Tensor, axis: Axis, dim: int) -> Tensor:
    """The inverse of `_split`: parts that follow each other along dim 0, put one behind the other along `dim`."""
    if dim % parts.dim() == 0:
        return parts
    return torch.cat(parts.chunk(axis.size), dim)
