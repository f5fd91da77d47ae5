"""The feed-forward block: column linears up, an activation, a row linear down. The block itself never talks.

Sources: arXiv:2002.05202 (SwiGLU: silu(w1 x) * w3 x), GPT-2's tanh approximation of GELU.
"""

from torch import Tensor, nn
from torch.nn import functional


class Mlp(nn.Module):
    """`linears` holds `w1` (and `w3` for swiglu), or the fused `w13` whose rows are [w1; w3], and `w2`."""

    w1: nn.Module
    w3: nn.Module
    w13: nn.Module
    w2: nn.Module

    def __init__(self, activation: str, linears: dict[str, nn.Module]) -> None:
        super().__init__()
        self.activation = activation
        for name, module in linears.items():
            self.add_module(name, module)
        self.fused = "w13" in linears

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states -> hidden states."""
        y: Tensor = self.w2(self._activated(x))
        return y

    def _activated(self, x: Tensor) -> Tensor:
        """This rank's inner features [.., .., ffn/p]."""
        first: Tensor
        up: Tensor
        if self.fused:
            # Local rows are [this rank's part of w1; its part of w3], so halves are the right cut here too.
            first, up = self.w13(x).chunk(2, -1)
            return functional.silu(first) * up
        first = self.w1(x)
        match self.activation:
            case "swiglu":
                up = self.w3(x)
                return functional.silu(first) * up
            case "relu":
                return functional.relu(first)
            case _:
                return functional.gelu(first, approximate="tanh")
