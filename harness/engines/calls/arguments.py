"""The arguments of torch's process group methods: read, and checked as far as one rank alone can.

A wrong argument is a ValueError in the rank's own code, as with gloo and NCCL; it names the value, the rule and a legal
value. What takes two ranks to check is compared when their calls are matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.engines.calls.signature import REDUCE_OPS
from harness.torch_internals.groups import Pending, waited

__all__ = ["checked", "counted", "reduction", "root_of", "rows_of", "sized"]

_ANY_DTYPE = ("sum", "max", "min", "product")


def checked(tensors: Any) -> list[Tensor]:
    """Plain dense tensors; a functional collective's pending output is waited for. Raises ValueError."""
    plain = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for i, tensor in enumerate(plain):
        if type(tensor) is not Tensor and isinstance(tensor, Pending):
            plain[i] = waited(tensor)
        if tensor.layout is not torch.strided:
            raise ValueError(f"tensor of layout {tensor.layout}: must be dense; legal: tensor.to_dense()")
        if not (
            tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        ):
            raise ValueError(
                f"tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}: "
                "must be contiguous, as for NCCL; legal: tensor.contiguous()"
            )
    return plain


def reduction(opts: Any, tensors: list[Tensor]) -> tuple[str, Sequence[Tensor]]:
    """The reduce op's name and the tensors to reduce: the given list itself, or copies scaled by a factor.

    Raises ValueError for a reduce op that the dtype does not have.
    """
    given = getattr(opts, "reduceOp", opts)
    name = "sum" if given is None else REDUCE_OPS[hash(given)]  # torch's hash of a reduce op is its number
    if name in _ANY_DTYPE:
        return name, tensors
    if name == "premul_sum":
        factor = given.__getstate__()[1]
        return name, [tensor.detach() * factor for tensor in tensors]
    for tensor in tensors:
        if name == "avg" and tensor.dtype is torch.bool:
            raise ValueError(f"reduce op {name} on {tensor.dtype}: needs numbers; legal: torch.float32")
        if name != "avg" and (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"reduce op {name} on {tensor.dtype}: needs integers or bool; legal: torch.int32")
    return name, tensors


def root_of(opts: Any) -> int:
    """The root's group rank: from torch's options, or as given."""
    return int(getattr(opts, "rootRank", opts or 0))


def rows_of(which: str, tensor: Tensor, rows: Sequence[int] | None, size: int) -> list[int]:
    """Rows of dim 0 for every peer: as given, else equal shares. Raises ValueError."""
    if rows:
        if len(rows) != size or sum(rows) != tensor.shape[0]:
            rule = f"must be {size} numbers that add up to dim 0, {tensor.shape[0]}"
            raise ValueError(f"all_to_all {which}_split_sizes {list(rows)}: {rule}")
        return list(rows)
    if tensor.shape[0] % size:
        rule = f"dim 0 must be divisible by the group's size {size}"
        raise ValueError(f"all_to_all {which} of shape {tuple(tensor.shape)}: {rule}; legal: {which}_split_sizes")
    return [tensor.shape[0] // size] * size


def sized(op: str, which: str, tensor: Tensor, numel: int, rule: str) -> None:
    """Raises ValueError unless the tensor has `numel` elements."""
    if tensor.numel() != numel:
        raise ValueError(f"{op} {which} of {tensor.numel()} elements: must have as many as {rule}, {numel}")


def counted(op: str, which: str, tensors: Sequence[Any], count: int) -> None:
    """Raises ValueError unless there are `count` tensors."""
    if len(tensors) != count:
        raise ValueError(f"{op} {which} of {len(tensors)} entries: must have {count}")
