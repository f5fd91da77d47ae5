"""Effect of a relu on gradients where rounding decides: the dense model, its kink moved a little to each side.

The value of a relu hardly changes near zero; its derivative jumps from 0 to 1. An element within rounding of zero
passes its gradient on in one right implementation and not in the next. No control run need flip that same element. Here
all elements within BAND epsilons of the run dtype, in units of the rms of the tensor, are taken to one side in
backward. The change of gradients is what the kink alone may change in one element; float64 has no such elements.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.errors import CaseError
from shardproof.reference.model import layers
from shardproof.reference.model.decoder import Arithmetic
from shardproof.reference.model.given import takes_given
from shardproof.reference.model.parameters import weights
from shardproof.reference.training.steps import train

BAND = 4.0
"""Epsilons of the run dtype by which the sums of some layers may err, in units of the tensor's rms."""


class _Moved(torch.autograd.Function):
    """relu in forward; in backward the derivative of a relu whose kink is at `place`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: float) -> Tensor:
        ctx.save_for_backward(x > place * x.square().mean().sqrt())
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (open_,) = ctx.saved_tensors
        return grad * open_, None


@takes_given
def kinks(
    case: Case, device: torch.device, *, side: int, states: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """By how much every float of the outcome and of the activations changes when the kink moves to this side (1, -1).

    `states`: those from which every step begins (see reference.training.states). `given`: see
    reference.training.given. Empty without a relu, and in float64.
    """
    if case.activation != "relu" or case.dtype == "float64":
        return {}
    exact = {name: weight.to(torch.float64) for name, weight in weights(case, device).items()}
    both = (Arithmetic(), moved(case, side))
    here, there = (train(case, exact, arithmetic=each, states=states, observed=True) for each in both)
    return {name: there[name] - value for name, value in here.items() if value.is_floating_point()}


def moved(case: Case, side: int) -> Arithmetic:
    """Arithmetic with the kink of relu on this side (1, -1) of all that rounding may carry across it."""
    return Arithmetic(activate=partial(_activate, place=side * BAND * torch.finfo(getattr(torch, case.dtype)).eps))


def refuse_decisive(
    case: Case, weights: Mapping[str, Tensor], outcome: Mapping[str, Tensor], states: Mapping[str, Tensor] | None
) -> None:
    """Raise CaseError where a relu that rounding flips may decide whether a step of this outcome is skipped."""
    if case.scaler == "none" or case.activation != "relu":
        return
    for side in (1, -1):
        other = train(case, weights, arithmetic=moved(case, side), states=states, dtype=torch.float64)
        for name in (f"skipped/{step}" for step in range(case.steps)):
            if other[name] != outcome[name]:
                rule = f"rounding decides {name}: it flips a relu"
                raise CaseError("loss_scale", case.loss_scale, rule, f"loss_scale={max(1.0, case.loss_scale / 4)}")


def _activate(kind: str, x_BSF: Tensor, gate_BSF: Tensor | None, *, place: float) -> Tensor:
    if kind != "relu" or gate_BSF is not None:
        return layers.activate(kind, x_BSF, gate_BSF)
    y_BSF: Tensor = _Moved.apply(x_BSF, place)
    return y_BSF
