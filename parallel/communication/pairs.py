"""Conjugate pairs: what a collective does forward decides what must happen to the gradient. Each pair is one function.

Layouts along one axis: *whole* = every rank holds the same tensor; *partial* = the tensor is the sum over the ranks.
*Split* = every rank holds its part along a dim. A gradient has the conjugate layout of its tensor: whole <-> partial
inside a parallel region, whole <-> whole outside it, split <-> split. All pairs bypass a group of one rank. Source:
Megatron-Core `tensor_parallel/mappings.py` (modes.md 4.1), generalised to any dim. Sequence parallelism:
arXiv:1909.08053, arXiv:2205.05198. All-to-all: arXiv:2309.14509. Uneven parts: DeepSpeed 0.19.8
`module_inject/layers.py` ScatterToTensorParallelRegion, GatherFromTensorParallelRegion.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardproof.parallel.communication.collectives import all_gather as _all_gather
from shardproof.parallel.communication.collectives import all_reduce, exchange, own_slice
from shardproof.parallel.communication.collectives import all_to_all as _all_to_all
from shardproof.parallel.communication.collectives import reduce_scatter as _reduce_scatter
from shardproof.parallel.communication.layout import Axis

_Move = Callable[[Tensor], Tensor]


class _Pair(torch.autograd.Function):
    """Forward is one movement of data, backward is its conjugate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: _Move, backward: _Move) -> Tensor:
        ctx.move = backward
        moved = forward(x)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.move(grad), None, None


def _pair(x: Tensor, axis: Axis, forward: _Move, backward: _Move) -> Tensor:
    return x if axis.size == 1 else _Pair.apply(x, forward, backward)


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Whole -> whole. Forward: nothing. Backward: all-reduce (every rank's use adds to the gradient)."""
    return _pair(x, axis, lambda y: y, lambda grad: all_reduce(grad, axis))


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Partial -> whole. Forward: all-reduce. Backward: nothing (the gradient is whole already)."""
    return _pair(x, axis, lambda y: all_reduce(y, axis), lambda grad: grad)


def scatter_to(x: Tensor, axis: Axis) -> Tensor:
    """Whole -> split on the last dim. Forward: own slice. Backward: all-gather."""
    return _pair(x, axis, lambda y: own_slice(y, axis, dim=-1), lambda grad: _all_gather(grad, axis, dim=-1))


def gather_from(x: Tensor, axis: Axis) -> Tensor:
    """Split on the last dim -> whole. Forward: all-gather. Backward: own slice."""
    return _pair(x, axis, lambda y: _all_gather(y, axis, dim=-1), lambda grad: own_slice(grad, axis, dim=-1))


def own_part(x: Tensor, axis: Axis, held: Sequence[range]) -> Tensor:
    """Whole -> this rank's ranges of the last dim, of any lengths; every element lies on one rank. Forward: own part.
    Backward: all-reduce of the gradient, zero outside the own part, so that the parts add up.
    """

    def complete_gradient(grad: Tensor) -> Tensor:
        whole = grad.new_zeros(x.shape)
        for part, own in zip(held, grad.split([len(part) for part in held], -1), strict=True):
            whole[..., part.start : part.stop] = own
        return all_reduce(whole, axis)

    return _pair(x, axis, lambda y: torch.cat([y[..., part.start : part.stop] for part in held], -1), complete_gradient)


def gather_parts(x: Tensor, axis: Axis, widths: Sequence[int]) -> Tensor:
    """Split on the last dim into parts of these widths by rank -> whole. Forward: all-gather of parts padded with zeros
    to the widest, and the padding cut off. Backward: own part.
    """
    widest, first = max(widths), sum(widths[: axis.rank])

    def gather_whole(y: Tensor) -> Tensor:
        parts = _all_gather(functional.pad(y, (0, widest - y.shape[-1])), axis, dim=-1).split(widest, -1)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1)

    return _pair(x, axis, gather_whole, lambda grad: grad[..., first : first + widths[axis.rank]].contiguous())


def scatter_to_sequence(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Whole -> split on the sequence `dim`. Forward: own slice. Backward: all-gather."""
    return _pair(x, axis, lambda y: own_slice(y, axis, dim=dim), lambda grad: _all_gather(grad, axis, dim=dim))


def gather_from_sequence(x: Tensor, axis: Axis, *, dim: int, tensor_parallel_output_grad: bool = True) -> Tensor:
    """Split on the sequence `dim` -> whole. Forward: all-gather. Backward: reduce-scatter.

    With `tensor_parallel_output_grad=False` what follows is not tensor parallel: its gradient is whole, not partial,
    and backward is the own slice.
    """
    if tensor_parallel_output_grad:
        return _pair(
            x, axis, lambda y: _all_gather(y, axis, dim=dim), lambda grad: _reduce_scatter(grad, axis, dim=dim)
        )
    return _pair(x, axis, lambda y: _all_gather(y, axis, dim=dim), lambda grad: own_slice(grad, axis, dim=dim))


def reduce_scatter_to_sequence(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Partial -> split on the sequence `dim`. Forward: reduce-scatter. Backward: all-gather."""
    return _pair(x, axis, lambda y: _reduce_scatter(y, axis, dim=dim), lambda grad: _all_gather(grad, axis, dim=dim))


def all_to_all(x: Tensor, axis: Axis, *, split_dim: int, gather_dim: int) -> Tensor:
    """Split on `gather_dim` -> split on `split_dim`. Forward: all-to-all. Backward: all-to-all, dims swapped."""
    return _pair(
        x,
        axis,
        lambda y: _all_to_all(y, axis, split_dim=split_dim, gather_dim=gather_dim),
        lambda grad: _all_to_all(grad, axis, split_dim=gather_dim, gather_dim=split_dim),
    )


def exchange_rows(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Rows to the ranks of an axis, `sent[i]` of them to rank i, in this order. Forward: all-to-all. Backward: the same
    the other way, `received[i]` to rank i.
    """
    return _pair(
        x, axis, lambda y: exchange(y, axis, sent, received), lambda grad: exchange(grad, axis, received, sent)
    )
