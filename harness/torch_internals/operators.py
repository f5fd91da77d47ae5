"""torch's dispatcher: which operators of collectives there are, their schemas, and kernels of our own for them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardproof.harness.torch_internals.lookup import found

_RECORDING = "recording on real backends"
_GROUP = "c10d.ProcessGroup"

_all_names: Callable[[], list[str]] = found(torch._C, "_dispatch_get_all_op_names", _RECORDING)
has_kernel: Callable[[str, str], bool] = found(torch._C, "_dispatch_has_kernel_for_dispatch_key", _RECORDING)
"""Whether "namespace::operator" has a kernel at a key. torch._C._dispatch_has_kernel_for_dispatch_key."""

FUSED: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""The fused kernel, None where torch has none; then attention on meta is decomposed, and memory is overestimated."""
FUSED_BACKWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


class Argument(NamedTuple):
    """An argument of an operator's schema: its name, and what it is: "tensors", "group" or "other"."""

    name: str
    kind: str


def operator_names(namespace: str) -> list[str]:
    """The names of a namespace's operators, without overloads, sorted. torch._C._dispatch_get_all_op_names, 3 ms."""
    start = namespace + "::"
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
    return found(torch._C, "DispatchKeySet", "the dry engine")(getattr(_keys, key))


def end_functional(tensor: Tensor) -> None:
    """Take the functional collective that made this tensor from torch's list of those under way.

    Uses torch.ops._c10d_functional.wait_tensor.
    """
    torch.ops._c10d_functional.wait_tensor.default.redispatch(dispatch_keys("CompositeExplicitAutograd"), tensor)
