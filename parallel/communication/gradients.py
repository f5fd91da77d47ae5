"""Gradients between the last backward and the optimizer: sums over ranks, mean, norm, clipping.

Every gradient arrives as the sum over this rank's micro-batches of the gradient of the summed loss. Order, once a step
(Megatron-Core `finalize_model_grads`, modes.md 4.7):

    1. over each data axis: all gradients, one flat all-reduce SUM a dtype
    2. over the weight axis: the partial gradients of whole parameters, one flat all-reduce SUM a dtype, or one each
    3. loss sum and token count, one all-reduce SUM of float64 [2] over each loss axis; then the mean
    4. over the weight axis: the squared norm, one all-reduce SUM of a scalar
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shardproof.parallel.communication.collectives import all_reduce
from shardproof.parallel.communication.layout import Placement
from shardproof.parallel.communication.mesh import Axis


def sum_gradients(gradients: Iterable[Tensor], axis: Axis) -> None:
    """Replace gradients by their sums over the axis, in place: one flat all-reduce for every dtype among them."""
    if axis.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for group in by_dtype.values():
        summed = all_reduce(torch.cat([gradient.flatten() for gradient in group]), axis)
        for gradient, part in zip(group, summed.split([gradient.numel() for gradient in group]), strict=True):
            gradient.copy_(part.view_as(gradient))


def sum_scalars(loss: Tensor, tokens: Tensor, axes: Iterable[Axis]) -> tuple[Tensor, Tensor]:
    """Loss sum and token count of all ranks with other data, as float64 scalars."""
    pair = torch.stack([loss.double(), tokens.double()])
    for axis in axes:
        pair = all_reduce(pair, axis)
    return pair[0], pair[1]


def norm(
    gradients: Mapping[str, Tensor], places: Mapping[str, Placement], axes: Sequence[Axis], dtype: torch.dtype
) -> Tensor:
    """The L2 norm of the full gradients, a scalar of `dtype`: every element counts once.

    A gradient counts on every rank of an axis that it is split over, and on the first rank only of each of the others.
    """

    def counts(name: str) -> bool:
        return all(axis.name in places[name].axes or axis.rank == 0 for axis in axes)

    squares = [gradient.to(dtype).square().sum() for name, gradient in gradients.items() if counts(name)]
    if not squares:  # a rank may hold nothing but copies of others' gradients
        squares = [next(iter(gradients.values())).new_zeros((), dtype=dtype)]
    total = torch.stack(squares).sum()
    for axis in axes:
        total = all_reduce(total, axis)
    return total.sqrt()


def clip(gradients: Iterable[Tensor], total: Tensor, largest: float) -> None:
    """Scale all gradients in place by min(1, largest / (total + 1e-6)); `largest` 0 switches clipping off."""
    if largest > 0:
        factor = (largest / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
