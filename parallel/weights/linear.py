"""Weight-parallel linears: the weight is split over an axis and whole only while it is used; activations never move.

Letters: weight [out, in] full, every rank of the axis (w of them) holds [out/w, in], its rows; bias [out/w] alike.
Inputs are [.., .., in] of this rank's own tokens. Every rank's tokens differ, so a gradient is a sum over all ranks.

    forward    all-gather of the weight, product
    backward   all-gather of the weight again; the reduce-scatter of its gradient travels while the input's gradient is
               computed

A bias costs the same three calls again, all of them, as in InternEvo: the gather in backward too, though no gradient
needs its value. A block's `Seat` decides which linear starts the gathers, and when (see `parallel.weights.prefetch`).
Saved for backward is the input alone. Source: InternEvo `WPFusedDenseFunc` (modes.md 3.6); gradients are sums here, not
means (decision G2).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardproof.parallel.communication.collectives import Pending, all_gather, start_all_gather, start_reduce_scatter
from shardproof.parallel.communication.mesh import Axis
from shardproof.parallel.weights.prefetch import Gathers, Seat


class Supply(Protocol):
    """Where a product gets its full weight from (see `Seat`)."""

    def edges(self) -> tuple[Tensor, ...]:
        """Tensors that the product depends on in the graph: weight, and bias when there is one."""
        ...

    def forward(self, edges: Sequence[Tensor]) -> list[Tensor]:
        """The full tensors for the product."""
        ...

    def look_back(self) -> AbstractContextManager[None]:
        """Around the first look at what the product saved."""
        ...

    def backward(self) -> Callable[[], list[Tensor]]:
        """Begin to gather for backward; the function returned waits for the full tensors."""
        ...

    def reduce(self, full: Tensor) -> Pending:
        """Begin to turn the gradient of a full tensor into the gradient of its edge."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The supply of a weight that is not prefetched."""

    weight: Tensor
    axis: Axis

    def edges(self) -> tuple[Tensor, ...]:
        """The shard."""
        return (self.weight,)

    def forward(self, edges: Sequence[Tensor]) -> list[Tensor]:
        """Gathered now."""
        return [all_gather(edge, self.axis, dim=0) for edge in edges]

    def look_back(self) -> AbstractContextManager[None]:
        """Nothing depends on it."""
        return nullcontext()

    def backward(self) -> Callable[[], list[Tensor]]:
        """Gathered during the product that gives the weight's gradient."""
        pending = start_all_gather(self.weight.detach(), self.axis, dim=0)
        return lambda: [pending.wait()]

    def reduce(self, full: Tensor) -> Pending:
        """This rank's shard of the sum."""
        return start_reduce_scatter(full, self.axis, dim=0)


class _WeightProduct(torch.autograd.Function):
    """x @ weight^T + bias; weight and bias come from the supply, their gradients go back to its edges."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, supply: Supply, *edges: Tensor) -> Tensor:
        ctx.supply = supply
        ctx.save_for_backward(x)
        return functional.linear(x, *supply.forward(edges))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        supply: Supply = ctx.supply
        with supply.look_back():
            (x,) = ctx.saved_tensors
        arriving = supply.backward()
        rows = grad.flatten(0, -2)
        reduced = [supply.reduce(rows.t() @ x.flatten(0, -2))]
        if len(ctx.needs_input_grad) > 3:
            reduced.append(supply.reduce(rows.sum(0)))
        weight = arriving()[0]
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_x, None, *(part.wait() for part in reduced)


def weight_product(x: Tensor, supply: Supply) -> Tensor:
    """x @ weight^T, plus the bias when there is one, with the full weight: [.., .., in] -> [.., .., out]."""
    y: Tensor = _WeightProduct.apply(x, supply, *supply.edges())
    return y


class WeightLinear(nn.Module):
    """Linear whose parameters are this rank's rows, [out/w, in] and [out/w]; its output has all features."""

    def __init__(
        self,
        shape: tuple[int, ...],
        gathers: Gathers,
        *,
        block: int,
        leaf: str,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(shape[:1], dtype=dtype, device=device)) if bias else None
        shards = (self.weight,) if self.bias is None else (self.weight, self.bias)
        self.seat: Seat = gathers.seat(block, leaf, shards)

    def forward(self, x: Tensor) -> Tensor:
        """[.., .., in] -> [.., .., out]."""
        return weight_product(x, self.seat)
