"""Further terms of the loss: scalars that modules add to it where they compute them, on whatever pipeline stage.

A term is attached to a tensor that the loss depends on. Forward hands the tensor on, backward gives the term the
gradient 1 beside it. So no module need return a term, and no stage send one. A term is part of the summed loss of its
micro-batch: gradients are divided by the step's tokens in the end. The loss of an outcome is that of the logits alone.
Source: Megatron-Core `MoEAuxLossAutoScaler`, `MTPLossAutoScaler`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Attached(torch.autograd.Function):
    """The tensor; in backward its gradient, and 1 for the term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor) -> Tensor:
        ctx.save_for_backward(term)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (term,) = ctx.saved_tensors
        return grad, torch.ones_like(term)


def _unscaled(loss: Tensor) -> Tensor:
    return loss


class Terms:
    """The terms of one rank. `scaled` gives their gradients the factor of the loss's own (`Step.loss_scale`)."""

    def __init__(self) -> None:
        self.scaled: Callable[[Tensor], Tensor] = _unscaled

    def attached(self, x: Tensor, term: Tensor) -> Tensor:
        """A tensor that the loss depends on, with a term [] that is added to this micro-batch's summed loss."""
        attached: Tensor = _Attached.apply(x, self.scaled(term))
        return attached
