"""Tensor-parallel linears: column (output features split) and row (input features split, outputs summed).

Letters: weight [out, in] full; a column linear holds [out/p, in], a row linear [out, in/p]. Inputs are [.., .., in]
with the sequence at dim `sequence_dim` when hidden states are split along it.

    linear | hidden states | forward                    | backward
    column | whole         | -                          | all-reduce of the input's gradient
    column | split         | all-gather of the input    | all-gather again unless kept; reduce-scatter of its gradient
    row    | whole         | all-reduce of the output   | -
    row    | split         | reduce-scatter             | all-gather of the output's gradient

The input gradient is sent while the weight gradient is computed (`overlap`; without it the same calls wait at once).
Source: arXiv:1909.08053, arXiv:2205.05198; Megatron-Core `LinearWithGradAccumulationAndAsyncCommunication` (gathers
again), InternEvo `SPFusedDenseFunc` (msp keeps, fsp gathers again): modes.md 2.1, 4.2.

A weight may have a holder of its gradient, `weight.holder(grad, x)`. The holder takes over the product grad^T x, grad
[tokens, out] and x [tokens, in], at once or later. The holder adds it to the gradient that it holds. Then it returns a
placeholder, which autograd hands on in place of a gradient and which must not be read. Without a holder the product is
the gradient. Source: Megatron-Core `gradient_accumulation_fusion`, whose kernel adds into `weight.main_grad`, and
`delay_wgrad_compute` (`backward_dw`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardproof.parallel.communication import pairs
from shardproof.parallel.communication.collectives import (
    Pending,
    all_gather,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from shardproof.parallel.communication.layout import Axis

Holder = Callable[[Tensor, Tensor], Tensor]


def holder_of(weight: Tensor) -> Holder | None:
    """The holder of this weight's gradient; None: autograd."""
    return getattr(weight, "holder", None)


def set_holder(weight: Tensor, holder: Holder) -> None:
    """Have `holder` take over the products of this weight's gradient, from the next forward on."""
    weight.holder = holder  # type: ignore[attr-defined]


def weight_gradient(holder: Holder | None, grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x [out, in] over all tokens, or the holder's placeholder for it."""
    rows, inputs = grad.detach().flatten(0, -2), x.detach().flatten(0, -2)
    return rows.t() @ inputs if holder is None else holder(rows, inputs)


class _Product(torch.autograd.Function):
    """x @ weight^T; the holder takes over the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, holder: Holder) -> Tensor:
        ctx.holder = holder
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        return grad_x, weight_gradient(ctx.holder, grad, x), None


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T, [.., .., in] -> [.., .., out]."""
    holder = holder_of(weight)
    if holder is None:
        return functional.linear(x, weight)
    y: Tensor = _Product.apply(x, weight, holder)
    return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The tensor-parallel region on `axis`: how hidden states lie outside of it, and which collectives bring them in
    and out.

    `sequence_dim` is the dim split over the axis, None when every rank holds them whole. `keep`: a column linear saves
    the gathered input for backward instead of gathering it again. `overlap`: gradients travel during the weight GEMM.
    """

    axis: Axis
    sequence_dim: int | None = None
    keep: bool = False
    overlap: bool = True

    def leave(self, y: Tensor) -> Tensor:
        """Partial sums -> hidden states. Forward: all-reduce | reduce-scatter. Backward: nothing | all-gather."""
        if self.sequence_dim is None:
            return pairs.reduce_from(y, self.axis)
        return pairs.reduce_scatter_to_sequence(y, self.axis, dim=self.sequence_dim)

    def gather_hidden(self, x: Tensor) -> Tensor:
        """Hidden states, whole on this rank."""
        return x if self.sequence_dim is None else all_gather(x, self.axis, dim=self.sequence_dim)

    def start_gather(self, x: Tensor) -> Pending:
        """Hidden states, whole on this rank; the gather travels during a GEMM."""
        if self.sequence_dim is None:
            return Pending(None, lambda: x)
        return start_all_gather(x, self.axis, dim=self.sequence_dim, overlap=self.overlap)

    def start_reduce(self, grad: Tensor, *, overlap: bool) -> Pending:
        """This rank's share of the gradient's sum over ranks. `grad` may be overwritten."""
        if self.sequence_dim is None:
            return start_all_reduce(grad, self.axis, overlap=overlap)
        return start_reduce_scatter(grad, self.axis, dim=self.sequence_dim, overlap=overlap)


class _ColumnProduct(torch.autograd.Function):
    """x @ weight^T + bias, with the collective by which the input enters the region, and its conjugate in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: Region) -> Tensor:
        total = region.gather_hidden(x)
        ctx.region, ctx.holder = region, holder_of(weight)
        ctx.save_for_backward(total if region.keep else x, weight)
        return functional.linear(total, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        region: Region = ctx.region
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        total = reduced = None
        if wants_weight:
            total = Pending(None, lambda: x) if region.keep else region.start_gather(x)
        if wants_x:
            # a frozen weight has no GEMM behind which the call could hide
            reduced = region.start_reduce(grad @ weight, overlap=region.overlap and wants_weight)
        if total is not None:
            grad_weight = weight_gradient(ctx.holder, grad, total.wait())
        if wants_bias:
            grad_bias = grad.flatten(0, -2).sum(0)
        if reduced is not None:
            grad_x = reduced.wait()
        return grad_x, grad_weight, grad_bias, None


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, region: Region) -> Tensor:
    """This rank's output features of x @ weight^T + bias, [.., .., out/p], for the whole sequence."""
    y: Tensor = _ColumnProduct.apply(x, weight, bias, region)
    return y


class ColumnLinear(nn.Module):
    """Linear whose output features are split over the region's axis; its parameters are this rank's rows.

    `gather_output` returns all features on every rank (forward all-gather, backward own slice). `shape` is the local
    [out/p, in].
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        region: Region,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        gather_output: bool = False,
    ) -> None:
        super().__init__()
        self.region, self.gather_output = region, gather_output
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(shape[:1], dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[.., .., in] -> [.., .., out/p] or, gathered, [.., .., out]."""
        y = column_linear(x, self.weight, self.bias, self.region)
        if self.gather_output:
            y = pairs.gather_from(y, self.region.axis)
        return y


class RowLinear(nn.Module):
    """Linear whose input features are split over the region's axis; the partial outputs are summed on the way out.

    The bias is whole on every rank and added once, after the sum.
    """

    def __init__(
        self, shape: tuple[int, ...], region: Region, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.region = region
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(shape[:1], dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[.., .., in/p] -> [.., .., out], or [.., .., out] of this rank's part of the sequence."""
        y = self.region.leave(product(x, self.weight))
        return y if self.bias is None else y + self.bias
