"""What a program finds on the meta device as on any other: the module of the device, and all collectives."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.torch_internals.groups import fake_group
from harness.torch_internals.lookup import Probe
from harness.torch_internals.operators import arguments_of, dispatch_keys, has_kernel, kernels, operator_names


@contextmanager
def meta_device() -> Iterator[None]:
    """Within it the meta device has a module, torch.meta, like torch.cpu: device meshes and DTensor look for it.

    Operators of c10d that have a kernel for the CPU and none for meta (coalesced ones) take that of the CPU, which
    passes the call to the group and looks at no tensor. The backend of a group for meta is that for the CPU: batches of
    messages look for it. Uses torch._C.DispatchKeySet, DispatchKey.CPU and ProcessGroup._get_backend.
    """
    with kernels("c10d", "Meta") as add, ExitStack() as stack:
        for name in operator_names("c10d"):
            operator: Any = getattr(getattr(torch.ops.c10d, name), "default", None)
            if operator is None or has_kernel(f"c10d::{name}", "Meta") or not has_kernel(f"c10d::{name}", "CPU"):
                continue
            if any(argument.kind == "group" for argument in arguments_of(operator)):
                add(name, functools.partial(operator.redispatch, dispatch_keys("CPU")))
        stack.enter_context(_backend_of_meta())
        if hasattr(torch, "meta"):
            yield
            return
        setattr(torch, "meta", SimpleNamespace(**{**vars(torch.cpu), "current_device": lambda: 0}))  # noqa: B010  (torch has no such name)
        try:
            yield
        finally:
            delattr(torch, "meta")


@contextmanager
def _backend_of_meta() -> Iterator[None]:
    original: Any = dist.ProcessGroup._get_backend

    def backend(group: dist.ProcessGroup, device: torch.device) -> Any:
        return original(group, torch.device("cpu") if torch.device(device).type == "meta" else device)

    kind: Any = dist.ProcessGroup
    kind._get_backend = backend
    try:
        yield
    finally:
        kind._get_backend = original


def _reaches_the_group() -> bool:
    tensors: list[Tensor] = [torch.ones(2, device="meta")]
    with meta_device():
        work = fake_group().allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions())
        device = torch.get_device_module("meta").current_device()
        backend = fake_group()._get_backend(torch.device("meta"))
    return isinstance(work, dist.Work) and device == 0 and backend is not None and not hasattr(torch, "meta")


PROBES = (
    Probe(
        feature="coalesced collectives, batches of messages and device modules on the meta device",
        names="torch._C.DispatchKeySet, DispatchKey.CPU; kernels of c10d for the CPU; ProcessGroup._get_backend",
        otherwise="a dry run of FSDP2, DTensor, a coalesced collective or a batch of messages is unknown",
        works=_reaches_the_group,
    ),
)
