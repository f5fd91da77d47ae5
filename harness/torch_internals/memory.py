"""Torch's memory: identities of objects in it, and freed memory that is given back to the system."""

import contextlib
import ctypes
import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_LARGE_BYTES = 2**27
"""Of the tensors of a case beside which other memory no longer matters."""


def storage_id(tensor: Tensor) -> int:
    """A number that tensors of one storage share for as long as it lives; addresses of meta tensors are all 0.

    Uses UntypedStorage._cdata, else the identity of the storage's object, which Python keeps while that lives.
    """
    storage: Any = tensor.untyped_storage()
    return int(getattr(storage, "_cdata", id(storage)))


def generator_address(generator: torch.Generator) -> int | None:
    """Where the C++ object of a generator lies. Uses Generator._cdata; None where it is missing."""
    return getattr(generator, "_cdata", None)


def give_back(tensors: Iterable[Tensor]) -> None:
    """Free what a run has left, and give it back to the system, where such tensors are still held that it counts."""
    if sum(tensor.nbytes for tensor in tensors) > _LARGE_BYTES:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # no glibc here
            ctypes.CDLL(None).malloc_trim(0)  # measured at hidden 2048: a proof's peak is 4.2 GiB, without this 4.8


def out_of_memory(problem: BaseException) -> bool:
    """Whether an exception says that there is no memory; torch's allocator of the CPU raises a plain RuntimeError."""
    return isinstance(problem, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(problem)
