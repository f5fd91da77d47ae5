"""The experts that a rank holds, or its part of each: T rows, sorted by expert, through their own MLPs.

Weights are [experts of the rank, out, in]. Of the inner features `etp` ranks hold a part each, so that outputs are
partial sums over these. The router's weight of a row multiplies its inner features, cast back to their dtype. No rank
talks here. Source: Megatron-Core 0.16.1 `SequentialMLP` (experts.md 21.6).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Stacked(nn.Module):
    """The weights of one linear of every expert."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
        self.weight.allreduce = False  # type: ignore[attr-defined]  # as Megatron-Core and DeepSpeed mark experts


class OwnExperts(nn.Module):
    """`shapes` are the local ones of up and down, and of gate for swiglu."""

    def __init__(
        self, activation: str, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.activation = activation
        for leaf, shape in shapes.items():
            self.add_module(leaf, _Stacked(shape, dtype, device))

    def forward(self, x_TH: Tensor, weights_T: Tensor, rows: Sequence[int]) -> Tensor:
        """Rows -> rows; `rows` says how many are each expert's, which may be none."""
        parts = zip(x_TH.split(list(rows)), weights_T.split(list(rows)), strict=True)
        return torch.cat([self._one(expert, *part) for expert, part in enumerate(parts)])

    def _one(self, expert: int, x_TH: Tensor, weights_T: Tensor) -> Tensor:
        inner = self._activated(expert, x_TH)
        inner = (inner * weights_T[:, None]).to(inner.dtype)
        return functional.linear(inner, self._weight("down", expert))

    def _activated(self, expert: int, x_TH: Tensor) -> Tensor:
        gated = self.activation == "swiglu"  # the gate comes first, so that backward completes its gradient last
        gate = functional.silu(functional.linear(x_TH, self._weight("gate", expert))) if gated else x_TH
        up = functional.linear(x_TH, self._weight("up", expert))
        match self.activation:
            case "swiglu":
                return gate * up
            case "relu":
                return functional.relu(up)
            case _:
                return functional.gelu(up, approximate="tanh")

    def _weight(self, leaf: str, expert: int) -> Tensor:
        stacked: Tensor = self.get_submodule(leaf).weight[expert]  # type: ignore[index]
        return stacked
