"""The loss scale of half-precision training: a state machine fed with whether a step met an infinite gradient.

    infinite step   growth = 0, hysteresis -= 1; with hysteresis <= 0 every such step backs off, down to `least`
    finite step     growth += 1; at `interval` the scale grows, growth = 0 and hysteresis is restored

A finite step alone does not restore hysteresis. An infinite step is skipped, whatever the scale then does. The static
scale never changes. Source: Megatron-Core 0.16.1 `DynamicGradScaler` with the defaults of its arguments (around.md
15.2); arXiv:1710.03740.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardproof.reference.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleState:
    """The scale of the coming step; finite steps since it grew or one was infinite; infinite ones still tolerated."""

    value: float
    growth: int
    hysteresis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScale:
    """The rule by which the scale changes after a step."""

    first: float = 2.0**32
    least: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    interval: int = 1000
    hysteresis: int = 2

    def start(self) -> ScaleState:
        """The state before the first step."""
        return ScaleState(value=self.first, growth=0, hysteresis=self.hysteresis)

    def after(self, state: ScaleState, *, infinite: bool) -> ScaleState:
        """The state after a step."""
        if infinite:
            left = state.hysteresis - 1
            value = max(state.value * self.backoff_factor, self.least) if left <= 0 else state.value
            return ScaleState(value=value, growth=0, hysteresis=left)
        if state.growth + 1 < self.interval:
            return replace(state, growth=state.growth + 1)
        return ScaleState(value=state.value * self.growth_factor, growth=0, hysteresis=self.hysteresis)


class LossScaling:
    """The scale of the case, static or dynamic: the factor of a rank's gradients while they are computed."""

    def __init__(self, case: Case) -> None:
        self._rule, self._is_dynamic = DynamicScale(first=case.loss_scale), case.scaler == "dynamic"
        self._state = self._rule.start()

    @property
    def value(self) -> float:
        """The factor of the coming step."""
        return self._state.value

    @property
    def state(self) -> Tensor:
        """The three numbers of `ScaleState`: float64 [3]."""
        state = self._state
        return torch.tensor([state.value, state.growth, state.hysteresis], dtype=torch.float64, device="cpu")

    def restore(self, state: Tensor) -> None:
        """Go on from a state as `state` gives it."""
        value, growth, hysteresis = state.tolist()
        self._state = ScaleState(value=value, growth=int(growth), hysteresis=int(hysteresis))

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss [] itself; its gradients are multiplied by `value`."""
        scaled: Tensor = _Scaled.apply(loss, self.value)
        return scaled

    def update(self, *, infinite: bool) -> None:
        """Go on to the next step; `infinite`: a gradient of this step was not finite."""
        if self._is_dynamic:
            self._state = self._rule.after(self._state, infinite=infinite)


class _Scaled(torch.autograd.Function):
    """Identity in forward; backward multiplies by the scale."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None
