"""The control run: the same dense training with every sum taken in another order, in the run dtype.

How far it lands from the truth is how far rounding alone may carry a right implementation: each contraction is cut into
as many partial sums as the case has ranks along its split, in both directions (inputs for the forward, outputs for the
gradient of the input, tokens for the gradient of the weight), each partial sum is rounded to the run dtype, and the
partial sums and the micro-batches add up last first. Nothing here is parallel: it is one process and dense weights.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from reference import activations as observation
from reference import layers
from reference.case import Case
from reference.decoder import Arithmetic
from reference.subject import weights
from reference.training import train

__all__ = ["control", "control_activations", "reordered", "split_linear", "split_norm"]


def control(case: Case, device: torch.device, *, parts: int = 0) -> dict[str, Tensor]:
    """The outcome of dense training in the case's dtype with the sums in another order, in `parts` (see reordered)."""
    return train(case, weights(case, device), arithmetic=reordered(case, parts), last_first=True)


def control_activations(case: Case, device: torch.device, *, parts: int = 0) -> dict[str, Tensor]:
    """The activations and activation gradients of the control run."""
    return observation.observe(case, weights(case, device), arithmetic=reordered(case, parts))


def reordered(case: Case, parts: int = 0) -> Arithmetic:
    """The sums of linears and norms in `parts`; 0: as many as the case has ranks along its split, at least two."""
    parts = parts or max(2, case.tp, case.wp)
    return Arithmetic(linear=partial(split_linear, parts=parts), norm=partial(split_norm, parts=parts))


def split_linear(x_BSE: Tensor, weight: Tensor, bias: Tensor | None, *, parts: int) -> Tensor:
    """The linear layer by `parts` partial sums over inputs and over outputs, and by two blocks of tokens."""
    blocks = [
        torch.cat([_summed(x_TE, rows, parts) for rows in weight.tensor_split(parts)], -1)
        for x_TE in x_BSE.flatten(0, -2).tensor_split(2)
    ]
    y_BSF = torch.cat(blocks).view(*x_BSE.shape[:-1], len(weight))
    return y_BSF if bias is None else y_BSF + bias


def _summed(x_TE: Tensor, rows: Tensor, parts: int) -> Tensor:
    """x @ rows^T as `parts` products over the inputs, added last first."""
    pairs = zip(x_TE.tensor_split(parts, -1), rows.tensor_split(parts, -1), strict=True)
    *rest, total = [x @ columns.T for x, columns in pairs]
    for product in reversed(rest):
        total = total + product
    return total


def split_norm(x_BSE: Tensor, weight: Tensor, bias: Tensor | None, *, parts: int) -> Tensor:
    """The norm by `parts` blocks of tokens, so that the gradients of its parameters are `parts` partial sums."""
    blocks = x_BSE.flatten(0, -2).tensor_split(parts)
    return torch.cat([layers.norm(block, weight, bias) for block in blocks]).view(x_BSE.shape)
