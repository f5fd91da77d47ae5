"""torch.cuda's functions answered for the CPU, for libraries that are written for GPUs and run without one here.

    with shardproof.cuda_on_cpu(): ...          subject.session = shardproof.cuda_on_cpu

There is one device, number 0, which is the CPU: `device="cuda"`, `.cuda()` and `.to("cuda")` stay where they are. Its
random stream is the CPU's, streams and events are always done, ranges of nvtx are dropped. A tensor is no copy after
`.cuda()`; `tensor.type()` is "torch.cuda.FloatTensor" or its like, but `tensor.is_cuda` is False. So split sizes that
code fetches from a GPU as numbers may reach all_to_all_single as the tensor that they are here. Names that were
imported from torch before (`from torch import zeros`) are not reached, nor is torch.Generator("cuda"). A device mesh is
to be made for "cpu".
"""

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.harness.torch_internals.lookup import replace_attribute

_MAKERS = (
    "arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace logspace ones ones_like rand "
    "rand_like randint randint_like randn randn_like randperm scalar_tensor tensor tril_indices triu_indices zeros "
    "zeros_like"
).split()
_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()
_ZEROS = "max_memory_allocated max_memory_reserved memory_allocated memory_reserved utilization".split()
_DONE = (
    "empty_cache init ipc_collect reset_max_memory_allocated reset_peak_memory_stats set_device set_stream synchronize"
).split()


def _always(answer: object) -> Callable[..., Any]:
    """A function of its own for every name: torch's compiler keeps a rule for each, by identity."""
    return lambda *_, **__: answer


class _Event:
    """An event of the CPU: it has happened when it is recorded."""

    def __init__(self, *_: object, **__: object) -> None:
        self._at_s = 0.0

    def record(self, stream: object = None) -> None:
        """Take the time."""
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        """Milliseconds on the host's clock."""
        return 1000 * (end._at_s - self._at_s)

    query = _always(True)
    wait = synchronize = _always(None)


class _Stream:
    """The one stream of the CPU; a context too."""

    device = torch.device("cpu")
    cuda_stream = stream_id = device_index = 0

    def __init__(self, *_: object, **__: object) -> None:
        """Takes what a CUDA stream takes, and needs none of it."""

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to leave."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self, event: _Event | None = None) -> _Event:
        """The event, recorded."""
        made = event or _Event()
        made.record()
        return made

    query = _always(True)
    wait_event = wait_stream = synchronize = _always(None)


class _Answers:
    """The answers in place, for as long as any thread is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = self._available = 0
        self._undo = ExitStack()

    def enter(self, available: bool) -> None:
        with self._lock:
            if not self._inside:
                self._put()
            self._inside += 1
            self._available += available

    def leave(self, available: bool) -> None:
        with self._lock:
            self._inside -= 1
            self._available -= available
            if not self._inside:
                self._undo.close()

    def _put(self) -> None:
        self._undo.callback(_forget_rules)
        for name in _MAKERS:
            self._set(torch, name, _made_here(getattr(torch, name)))
        for name in _METHODS:
            self._set(Tensor, name, _made_here(getattr(Tensor, name)))
        self._set(Tensor, "to", _made_here(Tensor.to, moves=True))
        self._set(Tensor, "cuda", _itself())
        self._set(torch.nn.Module, "to", _made_here(torch.nn.Module.to, moves=True))
        self._set(torch.nn.Module, "cuda", _itself())
        self._set(Tensor, "pin_memory", _itself())
        self._set(Tensor, "type", _typed_as_of_cuda(Tensor.type))
        for owner in (dist, dist.distributed_c10d):
            self._set(owner, "all_to_all_single", _with_splits_as_numbers(owner.all_to_all_single))
        self._set(Tensor, "record_stream", _always(None))
        was_available = torch.cuda.is_available
        self._set(torch.cuda, "is_available", lambda: self._available > 0 or was_available())
        for name, answer in _ANSWERS.items():
            self._set(torch.cuda, name, answer)
            if name in vars(torch.cuda.random):
                self._set(torch.cuda.random, name, answer)
        for name in ("mark", "range_end", "range_pop", "range_push", "range_start"):
            self._set(torch.cuda.nvtx, name, _always(None))
        self._set(torch.cuda.nvtx, "range", lambda *_, **__: nullcontext())

    def _set(self, owner: Any, name: str, value: object) -> None:
        """Set a name until the last thread leaves."""
        self._undo.enter_context(replace_attribute(owner, name, value))


@contextmanager
def cuda_on_cpu(*, available: bool = False) -> Iterator[None]:
    """Within it, CUDA's questions are answered for the CPU, in all threads of the process.

    The context may be entered again and by several threads; all is as before when the last one has left. With
    `available`, torch.cuda.is_available() is True, for libraries that refuse otherwise; others then choose kernels of a
    GPU.
    """
    _ANSWERING.enter(available)
    try:
        yield
    finally:
        _ANSWERING.leave(available)


def _here(device: Any) -> Any:
    """The device, the CPU for one of CUDA."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] == "cuda" else device
    return "cpu" if isinstance(device, int) and not isinstance(device, bool) else device


def _made_here(make: Callable[..., Any], *, moves: bool = False) -> Callable[..., Any]:
    """The function, with the CPU for a CUDA device in `device=` or, with `moves`, in the argument after the tensor."""

    @functools.wraps(make)
    def make_here(*args: Any, **words: Any) -> Any:
        if words.get("device") is not None:
            words["device"] = _here(words["device"])
        return make(*args[:1], *map(_here, args[1:2]), *args[2:], **words) if moves else make(*args, **words)

    return make_here


def _typed_as_of_cuda(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.type, by which libraries decide: a CPU tensor's is that of CUDA, and a type of CUDA is one of the CPU."""

    @functools.wraps(of_torch)
    def type_as_cuda(tensor: Tensor, dtype: Any = None, *args: Any, **words: Any) -> Any:
        if dtype is None:
            type_name = of_torch(tensor)
            here = tensor.device.type == "cpu" and ".cuda." not in type_name
            return type_name.replace("torch.", "torch.cuda.", 1) if here else type_name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        elif getattr(dtype, "__module__", "") == "torch.cuda":
            dtype = getattr(torch, dtype.__name__)
        return of_torch(tensor, dtype, *args, **words)

    return type_as_cuda


def _with_splits_as_numbers(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """all_to_all_single, whose split sizes may be one tensor."""

    def numbers(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, Tensor) else sizes

    @functools.wraps(exchange)
    def exchange_rows(
        output: Tensor,
        input: Tensor,  # noqa: A002  (torch's name)
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **words: Any,
    ) -> Any:
        return exchange(output, input, numbers(output_split_sizes), numbers(input_split_sizes), *args, **words)

    return exchange_rows


def _itself() -> Callable[..., Any]:
    return lambda owner, *_, **__: owner


def _forget_rules() -> None:
    """If torch's compiler was imported meanwhile, it looks torch's functions up again.

    Uses torch._dynamo.trace_rules.get_torch_obj_rule_map.
    """
    rules = getattr(sys.modules.get("torch._dynamo.trace_rules"), "get_torch_obj_rule_map", None)
    getattr(rules, "cache_clear", bool)()


def _properties(*_: object) -> SimpleNamespace:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = dict.fromkeys(("name", "gcnArchName"), "cpu")  # the second is what torch's compiler asks for without CUDA
    return SimpleNamespace(**names, major=0, minor=0, total_memory=total, multi_processor_count=1, warp_size=1)


_ANSWERS: dict[str, Any] = {
    **{name: _always(0) for name in _ZEROS},
    **{name: _always(None) for name in _DONE},
    "Event": _Event,
    "Stream": _Stream,
    "current_device": lambda: 0,
    "current_stream": _Stream,
    "default_generators": (torch.default_generator,),
    "default_stream": _Stream,
    "device": lambda *_: nullcontext(),
    "device_count": lambda: 1,
    "get_device_capability": lambda *_: (0, 0),
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": _properties,
    "is_bf16_supported": lambda *_, **__: True,
    "is_initialized": lambda: True,
    "mem_get_info": lambda *_: (_properties().total_memory,) * 2,
    "memory_stats": lambda *_: {},
    "stream": lambda *_: nullcontext(),
}
"""Functions that torch.cuda's random streams rest on are answered here; the streams need no answers of their own."""
_ANSWERING = _Answers()
