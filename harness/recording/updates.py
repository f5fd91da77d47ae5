"""Parameters as memory: whether they were changed since they were last looked at, and where they lie.

A program that updates its parameters without torch.optim calls nothing that could be seen. What changes is a few bytes
of the parameters themselves, so a few of them are looked at between a backward and the next forward: at most four
parameters of each outermost module, three elements of each, some microseconds a look. A version counter alone does not
do: `p.data.sub_(...)` leaves it as it is. Parameters on other devices than the CPU have nothing but the counter.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from harness.torch_internals.autograd import version_of

__all__ = ["Look", "Looks", "Memory"]

Look = tuple[bytes | int, ...]
"""One value a parameter, in the order in which they were first seen: bytes of it, or its version counter."""

_PARAMETERS, _MOST = 4, 64
"""Parameters looked at in one outermost module, and in all of them."""
_PLAIN = (Tensor, nn.Parameter)


class Looks:
    """The parameters of one rank that are looked at. With `on` False nothing is looked at any more."""

    def __init__(self) -> None:
        self.on = True
        self._seen: set[int] = set()
        self._chosen: list[tuple[Tensor, tuple[int, ...]]] = []

    def at(self, model: nn.Module | None = None) -> Look:
        """The values now; some parameters of a model that is new are looked at from now on."""
        if model is not None and id(model) not in self._seen:
            self._seen.add(id(model))
            if len(self._chosen) < _MOST:
                trained = _spread([p for p in model.parameters() if p.requires_grad], _PARAMETERS)
                known = {id(parameter) for parameter, _ in self._chosen}
                local = [part for part in map(_local, trained) if id(part) not in known]
                self._chosen += [(part, places) for part in local if (places := _places(part))]
        return tuple([_value(parameter, places) for parameter, places in self._chosen])


class Memory:
    """The memory of the parameters of some models; `parameter_bytes` are those of this rank's parts of them."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        held: dict[int, int] = {}
        self.models = len(models)
        self.parameter_bytes = 0
        for parameter in {id(p): p for model in models for p in model.parameters()}.values():
            local = _local(parameter)
            self.parameter_bytes += local.numel() * local.element_size()
            if type(local) in _PLAIN and local.device.type != "meta":
                storage = local.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
        self._starts = sorted(held)
        self._ends = [start + held[start] for start in self._starts]

    def holds(self, address: int) -> bool:
        """Whether a parameter's storage has this address."""
        index = bisect_right(self._starts, address) - 1
        return bool(address) and index >= 0 and address < self._ends[index]


def _local(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor, any other tensor as it is."""
    to_local: Callable[[], Tensor] | None = getattr(parameter, "to_local", None)
    if to_local is None:
        return parameter
    with torch.no_grad():  # then it is the part itself, and no node of autograd is made
        return to_local()


def _spread(parameters: list[Tensor], most: int) -> list[Tensor]:
    """At most so many of them, from the first to the last."""
    if len(parameters) <= most:
        return parameters
    return [parameters[place * (len(parameters) - 1) // (most - 1)] for place in range(most)]


def _value(parameter: Tensor, places: tuple[int, ...]) -> bytes | int:
    """The elements at these bytes; the version counter where there are none, as in a parameter that FSDP has freed."""
    read = parameter.element_size()
    if parameter.is_cpu:
        storage_bytes = parameter.untyped_storage().nbytes()
        if parameter.storage_offset() * read + places[-1] + read <= storage_bytes:
            address = parameter.data_ptr()
            return b"".join([ctypes.string_at(address + place, read) for place in places])
    return version_of(parameter)


def _places(parameter: Tensor) -> tuple[int, ...]:
    """Where the first, the middle and the last element begin, in bytes from the first; none of a tensor without."""
    if type(parameter) not in _PLAIN or not parameter.numel():
        return ()
    dims = list(zip(parameter.shape, parameter.stride(), strict=True))
    elements = {0, sum(size // 2 * stride for size, stride in dims), sum((size - 1) * stride for size, stride in dims)}
    return tuple(element * parameter.element_size() for element in sorted(elements))
