"""Control runs of a lower precision: the dense model computed, or sent, in a dtype that is lower than the case's.

A program that computes in mixed precision keeps its parameters and its optimizer as they are, and rounds what matrix
products are given and return: so does a control run here, in any dense model, by a dispatch mode. What is sent in a
lower dtype is a product's partial sum: products return rounded numbers then, in the passes in which the ledger has such
calls. A number is rounded to the digits of its new dtype and keeps its range, as loss scales see to.

Where everything is computed in float32 (in a float64 case), the control run is that of the case in float32, tables of
positions included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.checking.measures.tolerance import epsilon
from harness.protocols import CaseLike
from harness.resolve import resolve
from harness.running.truth.reference import Function, OwnTruth
from harness.torch_internals.autograd import current_task
from harness.torch_internals.modes import DispatchMode, FakeTensor, take_themselves_apart

BOTH = ("forward", "backward")
_GOLDEN = 0.618
"""Steps of this share of 1 come near no earlier one for long."""
_WHOLE = "float32"
"""What a case is computed in as a whole."""
_PRODUCTS = frozenset(
    "addbmm addmm addmv baddbmm bmm convolution convolution_backward dot linear matmul mm mv _grouped_mm "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention".split()
)
"""Operators of aten that multiply matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """A lower precision: the dtype in which everything is computed, and that in which partial sums are sent, "" for
    none; `passes` are those in which they are. `said` is where it comes from, in words.
    """

    compute: str = ""
    wire: str = ""
    passes: tuple[str, ...] = BOTH
    said: str = ""

    @property
    def precision(self) -> dict[str, str]:
        """Pass -> the lowest dtype in it."""
        used = {name: [self.compute, self.wire if name in self.passes else ""] for name in BOTH}
        return {name: max(filter(None, found), key=epsilon) for name, found in used.items() if any(found)}

    @property
    def lowest(self) -> str:
        """The lowest dtype of all."""
        return max(self.precision.values(), key=epsilon)

    def mode(self, scale: float = 1.0) -> AbstractContextManager[object]:
        """A context in which matrix products of this thread are rounded so, each number times `scale`: other scales
        round otherwise, and as much.
        """
        return _Rounded(self, scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedControl:
    """The function (case, device) -> outcome of a control run in a lower precision."""

    control: Function
    rounding: Rounding

    def __call__(self, case: CaseLike, device: torch.device, *, parts: int = 0, **words: Any) -> Mapping[str, Tensor]:
        """The outcome in this precision. Each number of `parts` rounds otherwise: runs that all round the same numbers
        alike would be one run.
        """
        rounds = partial(self.rounding.mode, 1 + parts * _GOLDEN % 1)
        if self.rounding.compute == _WHOLE:
            with suppress(ValueError):  # a subject whose cases have no such dtype
                case = case.but(dtype=_WHOLE)
        if isinstance(self.control, OwnTruth):  # rounds in the thread of its rank
            return replace(self.control, around=rounds)(case, device, parts=parts, **words)
        function: Any = resolve(self.control) if isinstance(self.control, str) else self.control
        with rounds():
            outcome: Mapping[str, Tensor] = function(case, device, parts=parts, **words)
        return outcome


class _Rounded(DispatchMode):
    """Rounds what products return, and what they are given where all is computed in a lower dtype."""

    def __init__(self, rounding: Rounding, scale: float) -> None:
        super().__init__()
        self._scale = scale
        self._inputs = rounding.compute and getattr(torch, rounding.compute)
        self._outputs = {name: getattr(torch, dtype) for name, dtype in rounding.precision.items()}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operator's result, rounded where it is a product."""
        kwargs = kwargs or {}
        if take_themselves_apart(types):
            return NotImplemented
        if operator.overloadpacket.__name__ not in _PRODUCTS or any(issubclass(kind, FakeTensor) for kind in types):
            return operator(*args, **kwargs)
        if self._inputs:
            args = [self._rounded(value, self._inputs) for value in args]
        result = operator(*args, **kwargs)
        dtype = self._outputs.get("backward" if current_task() >= 0 else "forward")
        if dtype is None:
            return result
        if isinstance(result, tuple):
            return tuple(self._rounded(one, dtype) for one in result)
        return self._rounded(result, dtype)

    def _rounded(self, value: Any, dtype: torch.dtype) -> Any:
        """A tensor of a wider dtype with the digits of this one; anything else as it is."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if torch.finfo(value.dtype).eps >= torch.finfo(dtype).eps:
            return value
        return _digits(value * self._scale, dtype) / self._scale


def _digits(value: Tensor, dtype: torch.dtype) -> Tensor:
    eps = torch.finfo(dtype).eps
    if dtype is not torch.float16 or value.dtype not in (torch.float64, torch.float32):
        return value.to(dtype).to(value.dtype)
    mantissa, exponent = torch.frexp(value)  # float16 has too small a range for gradients that nothing scales
    return torch.ldexp((mantissa * (2 / eps)).round() * (eps / 2), exponent)
