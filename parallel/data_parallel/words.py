"""What the words of data parallelism decide, for the program and its closed form alike."""

from __future__ import annotations

import torch

from reference.case import Case
from reference.model.parameters import dtype_of

__all__ = ["gradient_dtype", "replica_axis", "shard_axis", "trained_dtype", "unit_of"]


def gradient_dtype(case: Case) -> torch.dtype:
    """The dtype in which gradients are added up and summed over ranks."""
    return torch.float32 if case.grad_dtype == "float32" else dtype_of(case)


def trained_dtype(case: Case) -> torch.dtype:
    """The dtype of what the optimizer steps."""
    return torch.float32 if case.master == "float32" else dtype_of(case)


def shard_axis(case: Case) -> str:
    """The mesh axis over which parameters are sharded by rows."""
    return "shard" if case.shard else "dp"


def replica_axis(case: Case) -> str:
    """The mesh axis over which the shards are replicated."""
    return "replica"


def unit_of(name: str) -> str:
    """The module that a parameter is gathered with: its layer, or "", the model, outside of layers."""
    first, number, *_ = [*name.split("."), ""]
    return f"{first}.{number}" if first == "layers" else ""
