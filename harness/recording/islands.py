"""Arithmetic of a lower precision inside a float64 program: rotary tables, routers, losses that always use float32.

What matters is where a narrower number, other than a whole one, enters float64 arithmetic: an operator that takes one
and returns float64. A dispatch mode on every rank sees it. That slows a run, so it is done only when an error of a
float64 case is of the size that float32 makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.callers import caller
from harness.protocols import Value
from harness.subject import NamedSubject, called
from harness.torch_internals.modes import DispatchMode, leaves

__all__ = ["Island", "Probed"]

_NARROW: Mapping[torch.dtype, str] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_SEPARATOR = "|"


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """Where numbers of this dtype first enter float64 arithmetic: the operator and the user's line, "file:line"."""

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
    """A subject whose outcome is the names of its islands on this rank, the first one of each dtype."""

    subject: NamedSubject

    def __getattr__(self, attribute: str) -> Any:
        """Any other attribute is the subject's."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Value]:
        """Run the subject and return a name for each island."""
        with _Probe() as probe:
            called(self.subject.call, case, device)
        return {name: torch.ones(()) for name in probe.found.values()}


class _Probe(DispatchMode):
    """Remembers where numbers of each narrow dtype first entered float64 arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[torch.dtype, str] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operator's result, as it is."""
        result = operator(*args, **(kwargs or {}))
        if any(_is_float64(leaf) for leaf in leaves(result)):
            for leaf in leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.dtype in _NARROW.keys() - self.found.keys() and _rounds(leaf):
                    self.found[leaf.dtype] = _SEPARATOR.join((_NARROW[leaf.dtype], str(operator), caller()))
        return result


def _rounds(tensor: Tensor) -> bool:
    """Whether there is any number that is not whole: masks and counts are exact in every dtype."""
    return not bool(torch.equal(tensor, tensor.round()))


def _is_float64(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float64
