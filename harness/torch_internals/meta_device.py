"""What a program finds on the meta device as on any other: the module of the device, and all collectives."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.torch_internals.groups import fake_group
from harness.torch_internals.lookup import Probe
from harness.torch_internals.operators import arguments_of, dispatch_keys, has_kernel, kernels, operator_names

__all__ = ["PROBES", "meta_device"]


@contextmanager
def meta_device() -> Iterator[None]:
    """Within it the meta device has a module, torch.meta, like torch.cpu: device meshes and DTensor look for it.

    Operators of c10d that have a kernel for the CPU and none for meta (coalesced ones) take that of the CPU, which
    passes the call to the group and looks at no tensor. Uses torch._C.DispatchKeySet and DispatchKey.CPU.
    """
    with kernels("c10d", "Meta") as add:
        for name in operator_names("c10d"):
            operator: Any = getattr(getattr(torch.ops.c10d, name), "default", None)
            if operator is None or has_kernel(f"c10d::{name}", "Meta") or not has_kernel(f"c10d::{name}", "CPU"):
                continue
            if any(argument.kind == "group" for argument in arguments_of(operator)):
                add(name, functools.partial(operator.redispatch, dispatch_keys("CPU")))
        if hasattr(torch, "meta"):
            yield
            return
        setattr(torch, "meta", SimpleNamespace(**{**vars(torch.cpu), "current_device": lambda: 0}))  # noqa: B010  (torch has no such name)
        try:
            yield
        finally:
            delattr(torch, "meta")


def _reaches_the_group() -> bool:
    tensors: list[Tensor] = [torch.ones(2, device="meta")]
    with meta_device():
        work = fake_group().allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions())
        device = torch.get_device_module("meta").current_device()
    return isinstance(work, dist.Work) and device == 0 and not hasattr(torch, "meta")


PROBES = (
    Probe(
        feature="coalesced collectives and device modules on the meta device",
        names="torch._C.DispatchKeySet, DispatchKey.CPU; kernels of c10d for the CPU",
        otherwise="a dry run of FSDP2, DTensor or a coalesced collective is unknown",
        works=_reaches_the_group,
    ),
)
