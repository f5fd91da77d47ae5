"""What the words of data parallelism decide, for the program and its closed form alike."""

from __future__ import annotations

import torch

from reference.case import Case
from reference.model.parameters import dtype_of

__all__ = ["REPLICAS", "gradient_dtype", "shard_axis", "sharing_axes", "trained_dtype", "unit_of"]

REPLICAS = "replica"
"""The mesh axis over which shards are replicated."""


def gradient_dtype(case: Case) -> torch.dtype:
    """The dtype in which gradients are added up and summed over ranks."""
    return torch.float32 if case.grad_dtype == "float32" else dtype_of(case)


def trained_dtype(case: Case) -> torch.dtype:
    """The dtype of what the optimizer steps."""
    return torch.float32 if case.master == "float32" else dtype_of(case)


def shard_axis(case: Case) -> str:
    """The mesh axis over which parameters are sharded by rows."""
    return "shard" if case.shard else case.data_axis


def sharing_axes(case: Case, weight_axis: str) -> tuple[str, ...]:
    """The mesh axes over which all gradients together lie: of the weights, and of the ranks that share them."""
    return (weight_axis, shard_axis(case)) if case.zero else (weight_axis,)


def unit_of(name: str) -> str:
    """The module that a parameter is gathered with: its layer, or "", the model, outside of layers."""
    first, number, *_ = [*name.split("."), ""]
    return f"{first}.{number}" if first == "layers" else ""
