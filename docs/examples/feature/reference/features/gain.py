"""A learned gain: hidden states are multiplied by 1 + w as they leave a layer; ranks of the axis `gp` split w."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from shardproof.reference.language.core import Core
from shardproof.reference.language.words import Problem, multiple, word

if TYPE_CHECKING:
    from torch import Tensor


class Gain(Core):
    """A case whose layers have a gain."""

    gp: int = word(1, "ranks that split the gain of hidden states", domain=(1, 2), after="dp", axis=45)
    gain: bool = word(False, "a learned gain of hidden states behind every layer", after="qk_norm")

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The same with the gain, [hidden]."""
        return super().layer_shapes | ({"gain.weight": (self.hidden,)} if self.gain else {})

    def behind_layer(self, x_BSH: "Tensor", weights: Callable[[str], "Tensor"]) -> "Tensor":
        """The same, multiplied by 1 + w."""
        x_BSH = super().behind_layer(x_BSH, weights)
        return x_BSH * (1 + weights("gain.weight")) if self.gain else x_BSH

    def problems(self) -> Iterator[Problem]:
        """Key, the rule that it breaks and a legal value, of every broken rule."""
        if self.gain and (self.system.sequence or self.system.uneven):
            yield "gain", f"is of whole hidden states, and mode={self.mode} has none", "gain=false"
        if self.gain and self.early_stop:
            yield "early_stop", "ends before the gain, which ends a layer", "early_stop=false"
        if self.gp > 1 and not self.gain:
            yield "gp", "splits a gain, and gain=false has none", "gp=1"
        if self.hidden % self.gp:
            yield "hidden", f"must be a multiple of gp={self.gp}", f"hidden={multiple(self.hidden, self.gp)}"
