"""Norms over the last dim, with statistics in at least float32. Their parameters are whole on every rank.

Under a mode that splits the sequence (or, for q/k norms, the heads) each rank sees some rows only. The gradients are
then partial sums, which `gradients` adds up. Sources: arXiv:1607.06450, arXiv:1910.07467.
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
