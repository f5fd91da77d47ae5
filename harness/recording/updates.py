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
from typing import Any, Self

import torch
from torch import Tensor, nn

from harness.torch_internals.autograd import version_of

Look = tuple[tuple[bytes | int, ...], ...]
"""Of each parameter, in the order in which they were first seen: some of its elements, or its version counter."""

_PARAMETERS, _MOST = 4, 64
"""Parameters looked at in one outermost module, and in all of them."""
_PLAIN = (Tensor, nn.Parameter)


class _Looked:
    """One parameter that is looked at: its first, its middle and its last element where they lie now."""

    __slots__ = ("_address", "_cells", "_places", "moved", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.moved = False
        self._address = 0
        self._cells: list[Any] = []
        dims = list(zip(tensor.shape, tensor.stride(), strict=True))
        middle = sum(size // 2 * stride for size, stride in dims)
        last = sum((size - 1) * stride for size, stride in dims)
        self._places = tuple(place * tensor.element_size() for place in sorted({0, middle, last}))

    def values(self) -> tuple[bytes | int, ...]:
        """The bytes of the elements; the version counter on other devices and while there is no memory (FSDP)."""
        address = self.tensor.data_ptr()
        if address != self._address:
            self.moved = self.moved or bool(self._address)
            self._address, self._cells = address, self._found(address)
        return tuple([cell.raw for cell in self._cells]) or (version_of(self.tensor),)

    def _found(self, address: int) -> list[Any]:
        size, storage = self.tensor.element_size(), self.tensor.untyped_storage()
        begin = self.tensor.storage_offset() * size
        if not self.tensor.is_cpu or begin + self._places[-1] + size > storage.nbytes():
            return []
        return [(ctypes.c_char * size).from_address(address + place) for place in self._places]


class Looks:
    """The parameters of one rank that are looked at. With `on` False nothing is looked at any more."""

    def __init__(self) -> None:
        self.on = True
        self._seen: set[int] = set()
        self._looked: list[_Looked] = []
        self._latest: Look = ()

    @property
    def moved(self) -> bool:
        """Whether a parameter has come to lie elsewhere: an update by hand put another tensor into its place."""
        return any(looked.moved for looked in self._looked)

    def at(self, model: nn.Module | None = None) -> Look:
        """The values now, the same object as before where nothing changed; a new model's are among them from now on."""
        if model is not None and id(model) not in self._seen:
            self._seen.add(id(model))
            self._add(model)
        if not self._looked:
            return ()
        now = tuple([looked.values() for looked in self._looked])
        if now != self._latest:
            self._latest = now
        return self._latest

    def _add(self, model: nn.Module) -> None:
        if len(self._looked) >= _MOST:
            return
        known = {id(looked.tensor) for looked in self._looked}
        trained = [_local(parameter) for parameter in model.parameters() if parameter.requires_grad]
        plain = [part for part in trained if type(part) in _PLAIN and part.numel()]
        self._looked += [_Looked(part) for part in _spread(plain, _PARAMETERS) if id(part) not in known]


def differ(before: Look, now: Look) -> bool:
    """Whether a parameter changed; those that the later look alone has are new."""
    return before is not now and any(then != value for then, value in zip(before, now, strict=False))


class ParameterMemory:
    """The memory of the parameters of some models; `parameter_bytes` are those of this rank's parts of them.

    It is read after the run. Where parameters `moved` meanwhile, it says nothing about the time of a call.
    """

    def __init__(self) -> None:
        self.parameter_bytes = 0
        self.moved = False
        self._models = 0
        self._starts: list[int] = []
        self._ends: list[int] = []

    def of(self, models: Sequence[nn.Module]) -> Self:
        """This memory, read anew when there are more models than before."""
        if len(models) > self._models:
            self._models = len(models)
            self._read([_local(p) for p in {id(p): p for model in models for p in model.parameters()}.values()])
        return self

    def _read(self, parts: Sequence[Tensor]) -> None:
        self.parameter_bytes = sum(part.numel() * part.element_size() for part in parts)
        storages = [part.untyped_storage() for part in parts if type(part) in _PLAIN and part.device.type != "meta"]
        held = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self._starts = sorted(held)
        self._ends = [start + held[start] for start in self._starts]

    def mostly_in(self, gathered_bytes: int) -> bool:
        """Whether gathers of so many bytes may be of parameters: half of them or more, or anything where they lie
        elsewhere while nothing is computed with them (DeepSpeed's ZeRO-3).
        """
        return bool(self._models) and 2 * gathered_bytes >= self.parameter_bytes

    def holds(self, address: int) -> bool:
        """Whether a parameter's storage has this address, as far as that is known."""
        index = bisect_right(self._starts, address) - 1
        return not self.moved and bool(address) and index >= 0 and address < self._ends[index]


def _local(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor, any other tensor as it is."""
    to_local: Callable[[], Tensor] | None = getattr(parameter, "to_local", None)
    if to_local is None:
        return parameter
    with torch.no_grad():  # then it is the part itself, and no node of autograd is made
        return to_local()


def _spread(parameters: list[Tensor], most: int) -> list[Tensor]:
    """At most `most` of them, from the first to the last."""
    if len(parameters) <= most:
        return parameters
    return [parameters[place * (len(parameters) - 1) // (most - 1)] for place in range(most)]
