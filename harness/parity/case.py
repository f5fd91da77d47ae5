"""The case of a comparison: the second launch in the words that checks and diagnosis read of every case."""

from dataclasses import dataclass, replace
from typing import Any

from shardproof.harness.protocols import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCase:
    """Two launches. `axes` are those of the second one; every step is compared as one batch, so `micro` is 1."""

    name: str
    world_size: int
    axes: Axes
    steps: int
    dtype: str
    micro: int = 1
    seed: int = 0

    @property
    def mode(self) -> str:
        """The axes of more than one rank: "dp+tp", "one"."""
        return "+".join(sorted(self.axes)) or "one"

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis -> ranks in each of its groups."""
        return {axis: len(groups[0]) for axis, groups in self.axes.items()}

    def but(self, **words: Any) -> "ParityCase":
        """This case with some words changed."""
        return replace(self, **words)

    def __str__(self) -> str:
        sizes = " ".join(f"{axis}={size}" for axis, size in self.axis_sizes.items())
        return " ".join(filter(None, (self.name, sizes, f"steps={self.steps}", f"dtype={self.dtype}")))
