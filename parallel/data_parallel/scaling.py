"""Loss scaling of one rank: gradients are computed times the scale, and a step with an infinite one is skipped by all.

    once a step, before the norm     found_inf | all_reduce MAX float32 [1] over the weight axis, over the ranks that
                                     share the gradients, and over the pipeline

Unlike Megatron's, a skipped step computes its norm too and gathers parameters that nothing changed, so that the calls
follow from the case alone. Source: Megatron-Core 0.16.1 `MixedPrecisionOptimizer` (around.md 15.2).
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from parallel.communication.collectives import all_reduce
from parallel.data_parallel.loss_scale import DynamicScale, ScaleState
from parallel.model.strategy import Rank
from reference.case import Case


class LossScaling:
    """The scale of the case, static or dynamic; `value` is that of the coming step."""

    def __init__(self, case: Case) -> None:
        self._rule = DynamicScale(first=case.loss_scale) if case.scaler == "dynamic" else None
        self._state = DynamicScale(first=case.loss_scale).start()

    @property
    def value(self) -> float:
        """The factor of the gradients."""
        return self._state.value

    @property
    def state(self) -> Tensor:
        """The scale of the coming step, finite steps since it changed, infinite ones it tolerates: float64 [3]."""
        state = self._state
        return torch.tensor([state.value, state.growth, state.hysteresis], dtype=torch.float64, device="cpu")

    def restore(self, state: Tensor) -> None:
        """Go on from a state as `state` gives it."""
        value, growth, hysteresis = state.tolist()
        self._state = ScaleState(value=value, growth=int(growth), hysteresis=int(hysteresis))

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss [], whose gradients are `value` times as large."""
        scaled: Tensor = _Scaled.apply(loss, self.value)
        return scaled

    def unscale(self, rank: Rank) -> bool:
        """Divide all gradients by the scale, in place, and update it; whether one of any rank is not finite."""
        gradients = rank.gradients().values()
        mine = torch.stack([(~torch.isfinite(gradient)).any() for gradient in gradients]).any()
        found = mine.to(torch.float32)
        for axis in (rank.strategy.weight_axis, *rank.strategy.norm_axes):
            found = all_reduce(found, rank.mesh.axis(axis), op="max")
        for axis in itertools.chain(*rank.strategy.apart.values()):
            found = all_reduce(found, rank.mesh.axis(axis), op="max")
        for gradient in gradients:
            gradient.div_(self.value)
        infinite = rank.proves and bool(found.item())
        if self._rule is not None:
            self._state = self._rule.after(self._state, infinite=infinite)
        return infinite


class _Scaled(torch.autograd.Function):
    """Forward identity, backward times the scale."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None
