"""State of autograd in this thread, code objects by which frames of torch are known, and identities in its memory."""

import contextlib
import ctypes
import gc
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.function import BackwardCFunction, Function, FunctionCtx
from torch.optim.optimizer import Optimizer

from shardproof.harness.torch_internals.lookup import find_name, replace_attribute

_RECORDING = "recording"

current_task: Callable[[], int] = find_name(torch._C, "_current_graph_task_id", _RECORDING)
"""The graph task that runs in this thread, -1 outside of backward. Uses torch._C._current_graph_task_id."""
current_node: Callable[[], Any] = find_name(torch._C, "_current_autograd_node", _RECORDING)
"""The autograd node that runs in this thread, or None. Uses torch._C._current_autograd_node."""
next_number: Callable[[], int] = find_name(getattr(torch._C, "_autograd", None), "_get_sequence_nr", _RECORDING)
"""The sequence number of this thread's next autograd node. Uses torch._C._autograd._get_sequence_nr."""


_DISABLE = "_saved_tensors_hooks_disable"
number_of: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""The sequence number of a node, which counts up as a thread makes nodes. Uses Node._sequence_nr."""


def nodes_of(output: object, levels: int = 3) -> Iterator[Any]:
    """The nodes that made the tensors of an output: a tensor, or tensors in tuples, lists, mappings, dataclasses."""
    if isinstance(output, Tensor):
        if output.grad_fn is not None:
            yield output.grad_fn
    elif levels:
        if isinstance(output, Mapping):
            parts = list(output.values())
        elif isinstance(output, (tuple, list)):
            parts = list(output)
        else:
            parts = list(getattr(output, "__dict__", {}).values())
        for part in parts:
            yield from nodes_of(part, levels - 1)


def when_backward_ends(then: Callable[[], None]) -> None:
    """Call `then` when the backward that runs in this thread has ended. Uses Variable._execution_engine.

    If that is missing, nothing is called: an nvtx range of backward then ends with what follows it.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is not None:
        engine.queue_callback(then)


@contextmanager
def called_by(caller: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within it every module is called by `caller(torch's own way to call it)`. Uses nn.Module._call_impl.

    Raises RuntimeError when something else has wrapped the calls in the meantime and was not removed first.
    """
    original = nn.Module._call_impl
    wrapped = caller(original)
    nn.Module._call_impl = wrapped  # type: ignore[method-assign]
    try:
        yield
    finally:
        if nn.Module._call_impl is not wrapped:
            raise RuntimeError("nn.Module._call_impl was wrapped by other code meanwhile: leave in reverse order")
        nn.Module._call_impl = original  # type: ignore[method-assign]


@contextmanager
def told_of_backward(tell: Callable[[Any, Any], object]) -> Iterator[None]:
    """Within it `tell(tensors, their gradients)` is called before a backward that accumulates gradients.

    torch.autograd.backward is not enough: Megatron-Core's pipelines call the engine. Uses
    torch.autograd.Variable._execution_engine; without it nothing is told.
    """
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)

    class Engine:
        """The engine, with a `run_backward` that tells."""

        def run_backward(self, tensors: Any, grad_tensors: Any, *args: Any, **words: Any) -> Any:
            """Run a backward, torch's arguments and result."""
            if words.get("accumulate_grad"):
                tell(tensors, grad_tensors)
            return engine.run_backward(tensors, grad_tensors, *args, **words)

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

    if engine is None:
        yield
    else:
        with replace_attribute(torch.autograd.Variable, "_execution_engine", Engine()):
            yield


@contextmanager
def told_of_replaced_results(tell: Callable[[Tensor], object]) -> Iterator[None]:
    """Within it `tell(tensor)` is called before the memory of a result in a graph is replaced (`tensor.data = other`).

    Megatron-Core's pipelines do so to free what they have sent, before backward begins from it. Uses
    torch._C.TensorBase.data; without it nothing is told.
    """
    data: Any = getattr(torch._C.TensorBase, "data", None)

    def replace_memory(tensor: Any, other: Any) -> None:
        if tensor.grad_fn is not None:
            tell(tensor)
        data.__set__(tensor, other)

    if data is None:
        yield
    else:
        with replace_attribute(Tensor, "data", property(data.__get__, replace_memory)):
            yield


@contextmanager
def allow_disabled_hooks(own: Callable[[], graph.saved_tensors_hooks | None]) -> Iterator[None]:
    """Within it, transforms of torch.func may begin under hooks on saved tensors if the innermost are those of `own()`.

    Without this they refuse to begin under any hooks; under the program's own hooks they still do. Uses
    torch._C._autograd._saved_tensors_hooks_disable, through which torch.compile disables hooks too, and
    _top_saved_tensors_default_hooks; if they are missing, torch's refusal stands.
    """
    bindings = getattr(torch._C, "_autograd", None)
    disable: Any = getattr(bindings, _DISABLE, None)
    innermost: Any = getattr(bindings, "_top_saved_tensors_default_hooks", None)
    if disable is None or innermost is None:
        yield
        return

    def disable_below_own(message: str, fail_if_non_empty: bool = True) -> None:
        hooks, found = own(), innermost(True)
        stand = hooks is None or found is None or found[0] is not hooks.pack_hook
        disable(message, fail_if_non_empty and stand)

    with replace_attribute(bindings, _DISABLE, disable_below_own):
        yield


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after this module's forward, as plans of DTensor and FSDP2 install them.

    Uses nn.Module._forward_hooks and _forward_pre_hooks; if they are missing, a module is taken to have some.
    """
    return bool(getattr(module, "_forward_hooks", True) or getattr(module, "_forward_pre_hooks", True))


def defined_in(function: Any) -> CodeType:
    """The code of the inner function that a function defines and returns."""
    return next(constant for constant in function.__code__.co_consts if isinstance(constant, CodeType))


BACKWARD: CodeType = getattr(graph, "_engine_run_backward", torch.autograd.backward).__code__
"""The frame of Python that runs a backward. Uses torch.autograd.graph._engine_run_backward, else autograd.backward."""
STEP = defined_in(Optimizer.profile_hook_step)
"""The frame of Python around an optimizer's step. Uses what Optimizer.profile_hook_step returns."""


def node_raised(frames: Iterable[FrameType]) -> tuple[bool, int]:
    """Whether an exception that left these frames, the outermost first, passed through a backward. Also the number of
    the node of the innermost custom Function whose `backward` it passed through; -1 without one.
    """
    in_backward, node = False, -1
    for frame in frames:
        in_backward = in_backward or frame.f_code is BACKWARD
        context = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        if isinstance(context, BackwardCFunction):
            node = number_of(context)
    return in_backward, node


_apply: Any = getattr(Function.apply, "__func__", None)
_APPLY: CodeType | None = getattr(_apply, "__code__", None)
"""The frame of Function.apply up to torch 2.13; since 2.14 it is native code and has none."""


def function_context(frame: FrameType, inner: FrameType | None) -> tuple[bool, Any]:
    """Whether an autograd Function's forward runs here, and its context (None for one without).

    `inner` is the frame that `frame` has called, None for the innermost. Uses Function.apply's code; where that is
    native, a frame counts if it is the forward of some Function.
    """
    if _APPLY is not None:
        if frame.f_code is not _APPLY or inner is None or not inner.f_code.co_varnames:
            return False, None
        return True, inner.f_locals.get(inner.f_code.co_varnames[0])
    owner = _function_of(frame.f_code)
    if owner is None:
        return False, None
    context = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_varnames else None
    # a forward that takes a context but got none was called by hand: gradients are those of the code around it
    by_hand = owner.setup_context is Function.setup_context and not isinstance(context, FunctionCtx)
    return not by_hand, context


@lru_cache(maxsize=4096)
def _function_of(code: CodeType) -> type[Function] | None:
    """The autograd Function whose forward has this code."""
    kinds = list(Function.__subclasses__())
    while kinds:
        kind = kinds.pop()
        if getattr(kind.forward, "__code__", None) is code:
            return kind
        kinds += kind.__subclasses__()
    return None


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, by its counter; 0 where it has none. Uses Tensor._version."""
    return 0 if tensor.is_inference() else int(getattr(tensor, "_version", 0))


_unversioned: Any = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)


@contextmanager
def without_version(tensors: tuple[Tensor, ...]) -> Iterator[None]:
    """Within it, writes to these tensors do not count as changes. Uses torch.autograd._unsafe_preserve_version_counter.

    If that is missing they count, and autograd may refuse a tensor that a fault of shardproof's own has overwritten.
    """
    with contextlib.nullcontext() if _unversioned is None else _unversioned(tensors):
        yield


_LARGE_BYTES = 2**27
"""The size of a case's tensors beside which other memory does not matter."""


def numbers_of(tensor: Tensor) -> Tensor:
    """The tensor itself; of a sparse one its values, which lie in its memory. Uses Tensor._values."""
    if tensor.layout is torch.strided or tensor.is_mkldnn:
        return tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


def storage_id(tensor: Tensor) -> int:
    """A number that identifies a storage while it lives, equal for all its tensors. Addresses of meta tensors are all
    0.

    Uses UntypedStorage._cdata, otherwise the identity of the storage's object, which Python keeps while that lives.
    Tensors of MKLDNN show no storage: theirs is the tensor's identity.
    """
    storage: Any = tensor if tensor.is_mkldnn else numbers_of(tensor).untyped_storage()
    return int(getattr(storage, "_cdata", id(storage)))


def generator_address(generator: torch.Generator) -> int | None:
    """The address of a generator's C++ object. Uses Generator._cdata; None if that is missing."""
    return getattr(generator, "_cdata", None)


def give_back(tensors: Iterable[Tensor]) -> None:
    """Free what a run has left, and return it to the system, if it is enough to matter."""
    if sum(tensor.nbytes for tensor in tensors) > _LARGE_BYTES:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # no glibc here
            ctypes.CDLL(None).malloc_trim(0)  # measured at hidden 2048: a proof's peak is 4.2 GiB, without this 4.8


def out_of_memory(problem: BaseException) -> bool:
    """Whether an exception says that there is no memory; torch's allocator of the CPU raises a plain RuntimeError."""
    return isinstance(problem, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(problem)
