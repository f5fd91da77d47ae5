"""The parts of a transformer block that send nothing: norms and the feed-forward MLP.

Norms are over the last dim, with statistics in at least float32, and their parameters are whole on every rank. Under a
mode that splits the sequence (or, for q/k norms, the heads) each rank sees only some rows, so its gradients are partial
sums. The MLP is column linears up, an activation and a row linear down.

Sources: arXiv:1607.06450, arXiv:1910.07467 (norms); arXiv:2002.05202 (SwiGLU: silu(w1 x) * w3 x), GPT-2's tanh
approximation of GELU.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILON = 1e-5


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and losses: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Norm(nn.Module):
    """LayerNorm (`bias=True`) or RMSNorm (`bias=False`) of `width` features."""

    def __init__(self, width: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width], in the dtype of `x`."""
        exact = wide(x.dtype)
        width, weight = (x.shape[-1],), self.weight.to(exact)
        if self.bias is None:
            return functional.rms_norm(x.to(exact), width, weight, EPSILON).to(x.dtype)
        return functional.layer_norm(x.to(exact), width, weight, self.bias.to(exact), EPSILON).to(x.dtype)


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
        y: Tensor = self.w2(self._inner_features(x))
        return y

    def _inner_features(self, x: Tensor) -> Tensor:
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
