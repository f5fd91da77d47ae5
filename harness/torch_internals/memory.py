"""Torch's memory: identities of objects in it, and freed memory that is kept for the next tensor of its size."""

import contextlib
import ctypes
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of glibc's mallopt, by malloc.h."""
_KEPT_BYTES = 2**30
_IN_HEAP_BYTES, _IN_TIGHT_HEAP_BYTES = 2**25, 2**20
"""Tensors below this are taken from the heap; glibc takes no larger limit than the first."""
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


def keep_freed_memory() -> None:
    """Let this process take all but the largest tensors from its heap, and give back what is free at its end above a
    GiB.

    glibc's own way is a mapping for every large tensor. Its pages are new, so the first write to each is a page fault,
    and half of a run at real widths is spent there. Does nothing where there is no glibc.
    """
    for parameter, value in ((_MMAP_THRESHOLD, _IN_HEAP_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES), (_ARENA_MAX, 1)):
        _glibc("mallopt", parameter, value)


@contextlib.contextmanager
def tight_heap() -> Iterator[None]:
    """Take fewer tensors from the heap within it.

    A freed tensor leaves a hole that the next of its size does not fit, because it is aligned (glibc before 2.38).
    """
    _glibc("mallopt", _MMAP_THRESHOLD, _IN_TIGHT_HEAP_BYTES)
    try:
        yield
    finally:
        _glibc("mallopt", _MMAP_THRESHOLD, _IN_HEAP_BYTES)


def give_back(tensors: Iterable[Tensor]) -> None:
    """Free what a run has left, and give it back to the system, where such tensors are still held that it counts."""
    if sum(tensor.nbytes for tensor in tensors) > _LARGE_BYTES:
        gc.collect()
        _glibc("malloc_trim", 0)


def out_of_memory(problem: BaseException) -> bool:
    """Whether an exception says that there is no memory; torch's allocator of the CPU raises a plain RuntimeError."""
    return isinstance(problem, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(problem)


def _glibc(name: str, *words: int) -> None:
    """Call a function of glibc, if that is what there is."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), name)(*words)
