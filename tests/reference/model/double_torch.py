"""Hugging Face's float64 models without their rounding to float32.

Its Llama and OPT take norms, softmax and rotary angles in float32 even in a float64 model. With this module under the
name `torch` inside their code, `torch.float32` means float64: the mathematics stays, the rounding goes.
"""

from __future__ import annotations

from typing import Any

import torch


class DoubleTorch:
    """The module torch, where float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
