"""Arithmetic of a lower precision than the case's: rotary tables, routers, losses in float32, experts in bfloat16.

What matters is where a narrower number, other than a whole one, enters wider arithmetic: an operator that takes one and
returns a wider one. A dispatch mode on every rank sees it. That slows a run, so it is done only when an error of a case
is of the size that a lower precision makes.

Numbers that were computed in the case's dtype are rounded on the way, and each side may add them in an order of its
own. Constants (weights that were drawn in float32 and cast, samples, tables) are the same on both sides where both have
them, so they explain no error then.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.engines.calls.callers import caller
from harness.protocols import Value
from harness.subject import NamedSubject, called
from harness.torch_internals.memory import storage_id
from harness.torch_internals.modes import DispatchMode, leaves, take_themselves_apart

_EPSILONS: Mapping[str, float] = {
    name: float(torch.finfo(getattr(torch, name)).eps) for name in ("float64", "float32", "float16", "bfloat16")
}
_SEPARATOR = "|"


def narrower(dtype: str) -> tuple[str, ...]:
    """The dtypes of a lower precision than this one."""
    return tuple(name for name, eps in _EPSILONS.items() if eps > _EPSILONS[dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """Where numbers of this dtype first enter wider arithmetic: the operator and the user's line, "file:line"."""

    dtype: str
    operator: str
    place: str

    def __str__(self) -> str:
        return f"{self.dtype}, which enters at {self.place} ({self.operator})"

    @classmethod
    def read(cls, name: str) -> Island:
        """The island that an outcome name of a probed run stands for."""
        dtype, operator, place = name.split(_SEPARATOR)
        return cls(dtype=dtype, operator=operator, place=place)


@dataclass(frozen=True, slots=True)
class Probed:
    """A subject whose outcome is the names of its islands on this rank, the first one of each dtype below `dtype`.

    `constants`: whether numbers count that were not computed in it.
    """

    subject: NamedSubject
    dtype: str = "float64"
    constants: bool = True

    def __getattr__(self, attribute: str) -> Any:
        """Any other attribute is the subject's."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Value]:
        """Run the subject and return a name for each island."""
        with NarrowProbe(self.dtype, constants=self.constants) as probe:
            called(self.subject.call, case, device)
        return {name: torch.ones(()) for name in probe.found.values()}


class NarrowProbe(DispatchMode):
    """Remembers where numbers of each dtype below `dtype` first entered wider arithmetic: `found`, dtype to name.

    `constants`: whether numbers count that were not computed in `dtype`.
    """

    def __init__(self, dtype: str = "float64", *, constants: bool = True) -> None:
        super().__init__()
        self.found: dict[torch.dtype, str] = {}
        self._wide: torch.dtype = getattr(torch, dtype)
        self._narrow = {getattr(torch, name): name for name in narrower(dtype)}
        self._constants = constants
        self._computed: dict[int, Any] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operator's result, as it is."""
        if take_themselves_apart(types):
            return NotImplemented
        result = operator(*args, **(kwargs or {}))
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        returned = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        widest = min((torch.finfo(leaf.dtype).eps for leaf in returned if leaf.is_floating_point()), default=1.0)
        for leaf in given:
            name = self._narrow.get(leaf.dtype)
            if name and leaf.dtype not in self.found and widest < _EPSILONS[name] and self._counts(leaf):
                self.found[leaf.dtype] = _SEPARATOR.join((name, str(operator), caller()))
        if any(leaf.dtype == self._wide or self._is_computed(leaf) for leaf in given):
            self._remember(leaf for leaf in returned if leaf.dtype in self._narrow)
        return result

    def _counts(self, tensor: Tensor) -> bool:
        return (self._constants or self._is_computed(tensor)) and _rounds(tensor)

    def _is_computed(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._computed

    def _gone(self, key: int, _reference: object) -> None:
        del self._computed[key]

    def _remember(self, tensors: Iterable[Tensor]) -> None:
        """These were computed in the case's dtype, while their storage lives: its number is given again then."""
        for tensor in tensors:
            key = storage_id(tensor)
            if key not in self._computed:
                self._computed[key] = weakref.ref(tensor.untyped_storage(), functools.partial(self._gone, key))


def _rounds(tensor: Tensor) -> bool:
    """Whether there is any number that is not whole: masks and counts are exact in every dtype."""
    return not bool(torch.equal(tensor, tensor.round()))
