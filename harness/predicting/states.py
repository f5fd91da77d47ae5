"""What training keeps of every parameter beside the parameter itself, in bytes an element, by formula.

AdamW as Megatron-LM trains: gradients are added up in float32, two moments are float32, and where parameters have 16
bits a float32 master copy stands beside them:

    parameters        parameter  gradient  master  moments  together
    bfloat16, float16         2         4       4        8        18
    float32                   4         4       0        8        16
    float64                   8         8       0       16        32

Over d data ranks, a distributed optimizer splits master and moments: 6 + 12/d for 16 bits, 8 + 8/d for float32.
Source: Megatron-LM, docs/source/api-guide/dist_optimizer.md, "theoretical memory"; the row of float64, which Megatron
has not, is the same rule at 8 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes that are kept for every element of a parameter; `moments` are both of them."""

    parameter: int
    gradient: int
    master: int
    moments: int

    @property
    def optimizer(self) -> int:
        """What the optimizer keeps from step to step."""
        return self.master + self.moments

    @property
    def together(self) -> int:
        """Parameter, gradient, master and moments."""
        return self.parameter + self.gradient + self.optimizer


def mixed_adamw(dtype: str) -> States:
    """The states of AdamW for parameters of this dtype ("bfloat16"). Raises ValueError for one that is no float."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"dtype={dtype}: must be a floating-point dtype; legal: bfloat16")
    wide = max(kind.itemsize, _FLOAT32_BYTES)
    return States(
        parameter=kind.itemsize, gradient=wide, master=wide if kind.itemsize < _FLOAT32_BYTES else 0, moments=2 * wide
    )
