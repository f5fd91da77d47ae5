"""The loss scale of half-precision training: a state machine fed with whether a step met an infinite gradient.

    infinite step   growth = 0, hysteresis -= 1; with hysteresis <= 0 every such step backs off, down to `least`
    finite step     growth += 1; at `interval` the scale grows, growth = 0 and hysteresis is restored

A finite step alone does not restore hysteresis. An infinite step is skipped, whatever the scale then does. The static
scale never changes. Source: Megatron-Core 0.16.1 `DynamicGradScaler` with the defaults of its arguments (around.md
15.2); arXiv:1710.03740.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleState:
    """The scale of the coming step, finite steps since it last changed, and infinite ones that it still tolerates."""

    value: float
    growth: int
    hysteresis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScale:
    """The rule. Raises ValueError for a rule that could not grow, back off or stay positive."""

    first: float = 2.0**32
    least: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    interval: int = 1000
    hysteresis: int = 2

    def __post_init__(self) -> None:
        for name, holds, rule, legal in (
            ("least", 0 < self.least <= self.first, "must be positive and at most the first scale", 1.0),
            ("growth_factor", self.growth_factor > 1, "must be above 1", 2.0),
            ("backoff_factor", 0 < self.backoff_factor < 1, "must lie between 0 and 1", 0.5),
            ("interval", self.interval >= 1, "must be at least 1", 1000),
            ("hysteresis", self.hysteresis >= 1, "must be at least 1", 2),
        ):
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)}: {rule}; legal: {name}={legal}")

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


def scales(rule: DynamicScale, steps: Iterable[bool]) -> tuple[float, ...]:
    """The scale of every step and of the one after the last, from whether each was infinite."""
    state, found = rule.start(), [rule.first]
    for infinite in steps:
        state = rule.after(state, infinite=infinite)
        found.append(state.value)
    return tuple(found)
