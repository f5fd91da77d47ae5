"""torch's dispatcher: operators of collectives, their schemas, kernels of our own for them, and dispatch modes.

Also dispatch below autograd and past modes, and the switches of a thread.
"""

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.harness.torch_internals.compiler import Eager
from shardproof.harness.torch_internals.lookup import find_name

_RECORDING = "recording on real backends"
_GROUP = "c10d.ProcessGroup"

_all_names: Callable[[], list[str]] = find_name(torch._C, "_dispatch_get_all_op_names", _RECORDING)
has_kernel: Callable[[str, str], bool] = find_name(torch._C, "_dispatch_has_kernel_for_dispatch_key", _RECORDING)
"""Whether "namespace::operator" has a kernel at a key. torch._C._dispatch_has_kernel_for_dispatch_key."""

FUSED: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""The fused kernel, None where torch has none; then attention on meta is decomposed, and memory is overestimated."""
FUSED_BACKWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


class Argument(NamedTuple):
    """An argument of an operator's schema: its name, and what it is: "tensors", "group" or "other"."""

    name: str
    kind: str


def c10d_operators() -> list[str]:
    """The names of c10d's operators, without overloads, sorted. torch._C._dispatch_get_all_op_names, 3 ms."""
    start = "c10d::"
    return sorted({full.removeprefix(start).partition(".")[0] for full in _all_names() if full.startswith(start)})


def arguments_of(operator: Any) -> list[Argument]:
    """The arguments of an operator, from its schema. Uses OpOverload._schema."""
    found = []
    for argument in operator._schema.arguments:
        kind = str(argument.type)
        tensors = kind.replace("Optional[", "").replace("List[", "").rstrip("]") == "Tensor"
        found.append(Argument(argument.name, "group" if kind.endswith(_GROUP) else "tensors" if tensors else "other"))
    return found


def makes_new(operator: Any) -> bool:
    """Whether what an operator returns shares no memory with what it is given. Uses OpOverload._schema."""
    return all(one.alias_info is None for one in operator._schema.returns)


@functools.cache
def written_arguments(operator: Any) -> frozenset[int]:
    """The positions of the arguments that an operator writes to. Uses OpOverload._schema."""
    known = [argument.alias_info for argument in operator._schema.arguments]
    return frozenset(place for place, alias in enumerate(known) if alias is not None and alias.is_write)


def short_name(operator: Any) -> str:
    """An operator's name without namespace and overload: "all_reduce". Uses OpOverload._opname."""
    name: str = operator._opname
    return name


def full_name(operator: Any) -> str:
    """An operator's name with namespace and overload: "aten::mm.out". Uses OpOverload._schema."""
    schema = operator._schema
    name: str = schema.name + ("." if schema.overload_name else "") + schema.overload_name
    return name


def packet_of(operator: Any) -> Any:
    """All overloads of an operator as one object. Uses OpOverload._overloadpacket."""
    return operator._overloadpacket


Add = Callable[..., None]
"""add(name, kernel, with_keyset=False): the kernel is called in the operator's place, with the keys first if wanted."""


@contextmanager
def kernels(namespace: str, key: str) -> Iterator[Add]:
    """Within it, operators can be given kernels at one dispatch key. Uses torch.library.Library and its _destroy."""
    library = torch.library.Library(namespace, "IMPL")

    def add(name: str, kernel: Callable[..., Any], *, with_keyset: bool = False) -> None:
        library.impl(name, kernel, key, with_keyset=with_keyset)

    try:
        yield add
    finally:
        library._destroy()


_keys: Any = getattr(torch._C, "DispatchKey", None)
BACKEND_SELECT: Any = getattr(_keys, "BackendSelect", None)
"""The dispatch key at which calls are recorded. torch._C.DispatchKey.BackendSelect."""


def dispatch_keys(key: str) -> Any:
    """The set of one dispatch key by its name: "CPU", or "CompositeExplicitAutograd", where functional collectives have
    the implementation that issues the call. Uses torch._C.DispatchKeySet and DispatchKey.
    """
    return find_name(torch._C, "DispatchKeySet", "the dry engine")(getattr(_keys, key))


def end_functional(tensor: Tensor) -> None:
    """Take the functional collective that made this tensor from torch's list of those under way.

    Uses torch.ops._c10d_functional.wait_tensor.
    """
    torch.ops._c10d_functional.wait_tensor.default.redispatch(dispatch_keys("CompositeExplicitAutograd"), tensor)


_eager = Eager()


class DispatchMode(TorchDispatchMode):
    """Sees every operator of its thread: while one is entered nothing is compiled, on any thread.

    torch.utils._python_dispatch.TorchDispatchMode, which the documentation names. Its `_should_skip_dynamo` has the
    compiler switched off around every operator that a mode sees. That costs more than most operators: it is not done.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Self:
        _eager.begin()
        super().__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)
        _eager.end()


def leaves(nest: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, and of anything else that torch takes apart.

    Uses torch.utils._pytree.tree_leaves for other classes only: it takes longer than most operators.
    """
    found: list[Any] = []
    _add_leaves(nest, found)
    return found


def _add_leaves(nest: Any, found: list[Any]) -> None:
    kind = type(nest)
    if kind in _LEAVES:
        found.append(nest)
    elif kind is tuple or kind is list:
        for one in nest:
            _add_leaves(one, found)
    elif kind is dict:
        for one in nest.values():
            _add_leaves(one, found)
    else:
        found += _pytree.tree_leaves(nest)


def map_leaves(function: Callable[[Any], Any], nest: Any) -> Any:
    """The same nest with a function of every leaf. Uses torch.utils._pytree.tree_map as `leaves` does."""
    kind = type(nest)
    if kind in _LEAVES:
        return function(nest)
    if kind is tuple or kind is list:
        return kind([map_leaves(function, one) for one in nest])
    return _pytree.tree_map(function, nest)


_LEAVES = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device})
"""Classes of leaves."""

_NO_DISPATCH = Tensor.__torch_dispatch__
FakeTensor: Any = getattr(getattr(torch, "_subclasses", None), "FakeTensor", ())
"""Tensors with shapes alone, by which DTensor finds what an operator returns. torch._subclasses.FakeTensor."""


def take_themselves_apart(types: Iterable[Any]) -> bool:
    """Whether one of the tensors' classes dispatches operators itself: DTensor, or the result of a functional
    collective.

    Such a tensor may have no memory. If a mode returns NotImplemented for it, its class turns the operator into
    operators on plain tensors, for which the mode is called again. Fake tensors are left to their own mode.
    """
    return any(kind.__torch_dispatch__ is not _NO_DISPATCH and not issubclass(kind, FakeTensor) for kind in types)


below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", torch.no_grad)
"""A context in which autograd sees nothing, and versions are still counted. torch._C._AutoDispatchBelowAutograd.

If that is missing, torch.no_grad: slower, and a view of a leaf cannot be written then.
"""

_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
_no_dispatch: Any = getattr(torch._C, "_DisableTorchDispatch", nullcontext)
_no_function: Any = getattr(torch._C, "DisableTorchFunction", nullcontext)


def modes_are_on() -> int:
    """Whether this thread has dispatch or function modes; True if torch has no way to find out.

    Uses torch._C._len_torch_dispatch_stack and _len_torch_function_stack.
    """
    return _dispatch_modes() or _function_modes()


@contextmanager
def past_modes() -> Iterator[None]:
    """Within it no mode of the thread sees what is computed. torch._C._DisableTorchDispatch, DisableTorchFunction.

    Where they are missing, modes see it: a program that counts operators counts those of its collectives too.
    """
    with _no_dispatch(), _no_function():
        yield


@contextmanager
def hide_from_modes() -> Iterator[None]:
    """Within it neither autograd nor a mode of the thread sees what is computed."""
    with below_autograd(), _no_dispatch(), _no_function():
        yield


_keys_included: Callable[[], Any] | None = getattr(torch._C, "_dispatch_tls_local_include_set", None)
_keys_excluded: Callable[[], Any] | None = getattr(torch._C, "_dispatch_tls_local_exclude_set", None)


def keep_device_guard() -> None:
    """Set the device guard of FakeTensorMode in this thread, where torch is built for CUDA and finds no device.

    Torch sets it in the first thread that enters such a mode. In torch 2.11 the guard ends with that thread, and the
    next thread crashes (DTensor enters one). Uses torch._C._ensureCUDADeviceGuardSet, where there is one.
    """
    if torch.version.cuda and not torch.cuda.device_count():  # asks NVML: is_available would spoil CUDA for later forks
        getattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)()


def thread_switches() -> tuple[Any, ...]:
    """Switches that a program can leave in a thread of torch: grad mode, function modes, autocast, inference mode.

    Uses torch._C._dispatch_tls_local_include_set and _exclude_set; where they are missing, an object that equals no
    other, so that no thread is used again.
    """
    if _keys_included is None or _keys_excluded is None:
        return (object(),)
    return (torch.is_grad_enabled(), _function_modes(), _keys_included().raw_repr(), _keys_excluded().raw_repr())


_copy_each: Callable[[list[Tensor], list[Tensor]], object] | None = getattr(torch, "_foreach_copy_", None)


def copy_each(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into its output, in one operator. Uses torch._foreach_copy_, else Tensor.copy_ one by one."""
    if _copy_each is not None:
        _copy_each(list(outputs), list(values))
        return
    for output, value in zip(outputs, values, strict=True):
        output.copy_(value)


_choose_algorithms: Callable[..., None] = getattr(
    torch._C, "_set_deterministic_algorithms", torch.use_deterministic_algorithms
)


def not_deterministic() -> None:
    """Restore torch.use_deterministic_algorithms(False), whose public function imports the whole compiler.

    Uses torch._C._set_deterministic_algorithms, else that function.
    """
    _choose_algorithms(False)


@contextmanager
def deterministic_on(device: torch.device) -> Iterator[None]:
    """Within it a GPU adds up in a fixed order wherever torch can: by default sums such as index_add's are in any.

    Two runs of the same case then agree bit for bit. Without effect on a CPU, whose sums have an order.
    """
    if device.type != "cuda":
        yield
        return
    was = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; products need it
    _choose_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
            yield
    finally:
        _choose_algorithms(was, warn_only=only_warns)
