"""Identities of torch's objects in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.torch_internals.lookup import Probe

__all__ = ["PROBES", "generator_address", "storage_id"]


def storage_id(tensor: Tensor) -> int:
    """A number that tensors of one storage share for as long as it lives; addresses of meta tensors are all 0.

    Uses UntypedStorage._cdata, else the identity of the storage's object, which Python keeps while that lives.
    """
    storage: Any = tensor.untyped_storage()
    return int(getattr(storage, "_cdata", id(storage)))


def generator_address(generator: torch.Generator) -> int | None:
    """Where the C++ object of a generator lies. Uses Generator._cdata; None where it is missing."""
    return getattr(generator, "_cdata", None)


def _one_storage_one_number() -> bool:
    whole = torch.empty(4, device="meta")
    return storage_id(whole) == storage_id(whole[1:]) != storage_id(torch.empty(4, device="meta"))


PROBES = (
    Probe(
        feature="memory counted by storage",
        names="UntypedStorage._cdata",
        otherwise="the identity of the Python object stands for it",
        works=_one_storage_one_number,
    ),
)
