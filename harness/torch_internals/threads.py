"""What torch keeps for a thread and must give up before the thread ends."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["forget_dtensor_plans"]


def forget_dtensor_plans() -> None:
    """Empty this thread's cache of how DTensor splits operators, where torch has one.

    After an operator of DTensor raised, torch frees it without the GIL when the thread ends, and the process aborts.
    Uses torch._C._clear_DTensor_sharding_propagator_cache.
    """
    clear: Any = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
