"""The gradient of a linear's weight, by autograd or by whoever holds the gradients.

A weight may have a holder, `weight.holder(grad, x)`. The holder takes over the product grad^T x, grad [tokens, out] and
x [tokens, in], at once or later. The holder adds it to the gradient that it holds. Then it returns a placeholder, which
autograd hands on in place of a gradient and which must not be read. Without a holder the product is the gradient.

Source: Megatron-Core `gradient_accumulation_fusion`, whose kernel adds into `weight.main_grad`, and
`delay_wgrad_compute` (`backward_dw`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Holder = Callable[[Tensor, Tensor], Tensor]


def holder_of(weight: Tensor) -> Holder | None:
    """Holder of the products of this weight's gradient; None: autograd."""
    return getattr(weight, "holder", None)


def set_holder(weight: Tensor, holder: Holder) -> None:
    """Have the products of this weight's gradient taken over, from the next forward on."""
    weight.holder = holder  # type: ignore[attr-defined]


def weight_gradient(holder: Holder | None, grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x [out, in] over all tokens, or the holder's placeholder for it."""
    rows, inputs = grad.detach().flatten(0, -2), x.detach().flatten(0, -2)
    return rows.t() @ inputs if holder is None else holder(rows, inputs)


class _Product(torch.autograd.Function):
    """x @ weight^T whose holder takes over the weight's gradient."""

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
