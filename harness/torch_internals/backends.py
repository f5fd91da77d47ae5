"""Real and fake backends: torch's fake group and its work, waits for works, the store of the world, the meta device.

Also torch's own logs of calls: the header of a profiler's trace and the Flight Recorder.

`meta_device` and `fused_attention` add what torch's meta device lacks: a module, all collectives, and fused attention.
The fused kernel of attention saves q, k, v, the output and one number a row for backward. On meta torch would decompose
it into products and a softmax and save every score, which no device does at real sizes. A mask of booleans becomes one
of the dtype of q, as in torch's own kernels. Values of another width than keys (latent attention) take the kernel that
torch has for them on GPUs. Dropout, grouped heads without repetition, trained masks and tensors of other than four dims
are left to the decomposition. Source: torch's `_fused_sdp_choice` of the CPU, and of CUDA for such values.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from shardproof.harness.torch_internals.dispatch import (
    FUSED,
    arguments_of,
    c10d_operators,
    dispatch_keys,
    has_kernel,
    kernels,
)
from shardproof.harness.torch_internals.lookup import find_name, lacking_error, replace_attribute

_internals: Any = torch._C._distributed_c10d
_WAITS = ("wait", "synchronize", "block_current_stream", "get_future", "get_future_result")
"""The methods of a work by which a program waits for it, or gets something to wait for."""


def fake_store() -> Any:
    """A store for a world of one process without communication; registers torch's backend "fake".

    Uses torch.testing._internal.distributed.fake_pg. Raises MachineError where torch lacks it.
    """
    try:
        # Importing it registers the backend, for every kind of device.
        from torch.testing._internal.distributed import fake_pg  # noqa: PLC0415  (a torch without it is told)
    except ImportError as problem:
        raise lacking_error("the dry engine", "torch.testing._internal.distributed.fake_pg") from problem
    return fake_pg.FakeStore()


def fake_group() -> dist.ProcessGroup:
    """A private group of one rank, which no table of torch holds and whose calls move nothing.

    Uses torch._C._distributed_c10d.FakeProcessGroup and ProcessGroup._register_backend. Raises MachineError where torch
    lacks them.
    """
    kind = getattr(_internals, "FakeProcessGroup", None)
    if kind is None:
        raise lacking_error("recording on real backends", "torch._C._distributed_c10d.FakeProcessGroup")
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    backend = kind._create_internal(0, 1)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    return group


@contextmanager
def waits_of_fakes(waited_for: Callable[[int], None]) -> Iterator[None]:
    """Within it `waited_for(id of the work)` is called before every wait for a work of the fake group.

    Uses torch._C._distributed_c10d.FakeWork. Raises MachineError where torch lacks it.
    """
    kind: Any = getattr(_internals, "FakeWork", None)
    if kind is None:
        raise lacking_error("timelines of dry runs", "torch._C._distributed_c10d.FakeWork")
    with _tell_waits(kind, ("wait",), waited_for):
        yield


@contextmanager
def waits_of_works(waited_for: Callable[[int], None]) -> Iterator[None]:
    """Within it `waited_for(id of the work)` is called before every wait for a work of a backend, and for what amounts
    to one. Wraps methods of torch.distributed.Work, which has to be a class that can be changed.
    """
    with _tell_waits(dist.Work, _WAITS, waited_for):
        yield


@contextmanager
def _tell_waits(kind: Any, names: Iterable[str], waited_for: Callable[[int], None]) -> Iterator[None]:
    """Within it these methods of a class of works, if it has them, call `waited_for(id of the work)` first."""

    def wrap_method(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **words: Any) -> Any:
            waited_for(id(work))
            return original(work, *args, **words)

        return wait

    with ExitStack() as undo:
        for name in names:
            if hasattr(kind, name):
                undo.enter_context(replace_attribute(kind, name, wrap_method(getattr(kind, name))))
        yield


default_store: Any = find_name(c10d, "_get_default_store", "waiting for all ranks without a call")
"""The store over which the ranks of the world met. Uses distributed_c10d._get_default_store."""


def distributed_header(traced: Any) -> Mapping[str, Any]:
    """The header of a trace on the world and its groups; {} where there is none. Uses profile._get_distributed_info."""
    header: Mapping[str, Any] = getattr(traced, "_get_distributed_info", dict)() or {}
    return header


def flight_record() -> list[Mapping[str, Any]]:
    """Torch's own log of calls, oldest first; [] where this torch keeps none.

    Uses torch._C._distributed_c10d._dump_fr_trace_json.
    """
    dump = getattr(_internals, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    entries: list[Mapping[str, Any]] = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return sorted(entries, key=lambda entry: int(entry["record_id"]))


_aten: Any = torch.ops.aten
FUSED_UNLIKE: Any = getattr(_aten, "_scaled_dot_product_efficient_attention", None)
"""The operator for values of another width than keys; torch's registry has its FLOPs."""


@contextmanager
def meta_device() -> Iterator[None]:
    """Within it the meta device has a module, torch.meta, like torch.cpu: device meshes and DTensor look for it.

    Operators of c10d that have a kernel for the CPU and none for meta (coalesced ones) take that of the CPU. The kernel
    passes the call to the group and looks at no tensor. The backend of a group for meta is that for the CPU: batches of
    messages look for it. Uses torch._C.DispatchKeySet, DispatchKey.CPU and ProcessGroup._get_backend.
    """
    with kernels("c10d", "Meta") as add, ExitStack() as stack:
        for name in c10d_operators():
            operator: Any = getattr(getattr(torch.ops.c10d, name), "default", None)
            if operator is None or has_kernel(f"c10d::{name}", "Meta") or not has_kernel(f"c10d::{name}", "CPU"):
                continue
            if any(argument.kind == "group" for argument in arguments_of(operator)):
                add(name, functools.partial(operator.redispatch, dispatch_keys("CPU")))
        backend_of: Any = dist.ProcessGroup._get_backend

        def backend(group: dist.ProcessGroup, device: torch.device) -> Any:
            return backend_of(group, torch.device("cpu") if torch.device(device).type == "meta" else device)

        stack.enter_context(replace_attribute(dist.ProcessGroup, "_get_backend", backend))
        if not hasattr(torch, "meta"):
            like_cpu = SimpleNamespace(**{**vars(torch.cpu), "current_device": lambda: 0})
            stack.enter_context(replace_attribute(torch, "meta", like_cpu))
        yield


@contextmanager
def fused_attention() -> Iterator[None]:
    """Within it, attention on meta tensors takes the fused kernel, in every thread of this process.

    Uses torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, _scaled_dot_product_efficient_attention and
    _scaled_dot_product_attention_math.
    """
    with kernels("aten", "AutogradMeta") as add:
        if FUSED is not None:
            add("scaled_dot_product_attention", _attention)
        yield


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    mask = attn_mask
    alike = query.dim() == key.dim() == value.dim() == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    trained = mask is not None and mask.requires_grad
    unlike = query.shape[-1] != value.shape[-1]
    decomposed = not alike or dropout_p or trained or (mask is not None and is_causal)
    if decomposed or (unlike and FUSED_UNLIKE is None):
        whole, _scores = _aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
        return whole  # type: ignore[no-any-return]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    if unlike:
        return FUSED_UNLIKE(query, key, value, mask, True, 0.0, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    out, _rows = FUSED(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
    return out  # type: ignore[no-any-return]
