"""The list of calls, filled by the modules beside this one."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed
"""Untyped on purpose: the list hands torch what its stubs do not know, too."""
Call = Callable[[int, int], Any]
CALLS: dict[str, Call] = {}
"""Name -> a function of (rank, ranks) that makes calls and returns what it got."""

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
"""int16 is carried by no backend: every call with it raises."""


def listed(kind: type) -> type:
    """A class decorator: its methods are on the list under their names."""
    made = kind()
    calls = {name: getattr(made, name) for name in vars(kind) if not name.startswith("_")}
    assert not calls.keys() & CALLS.keys()
    CALLS.update(calls)
    return kind


def own(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A rank's input: small whole numbers, different on every rank and in every place."""
    drawn = torch.randint(1, 6, shape, generator=torch.Generator().manual_seed(100 + rank))
    return drawn.to(dtype) * (1 + 2j) if dtype.is_complex else drawn.to(dtype)


def filled(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor to be overwritten."""
    return torch.full(shape, 77, dtype=dtype) if dtype is not torch.bool else torch.zeros(shape, dtype=dtype)


def changed(tensor: Tensor, call: Callable[[Tensor], Any]) -> Tensor:
    """A tensor after the call that it was handed to."""
    call(tensor)
    return tensor


def plain(value: Any) -> Any:
    """Tensors as (dtype, shape, numbers), in any nesting."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().resolve_conj().tolist())
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def each(dtypes: Any, call: Any) -> dict[str, Any]:
    """Result of the call for every dtype, or that it raises."""
    found = {}
    for dtype in dtypes:
        try:
            found[str(dtype)] = call(dtype)
        except (RuntimeError, ValueError):
            found[str(dtype)] = "raised"
    return found
