"""The numbers that a program draws from random streams: each draw's operator, line and module, and a hash of its bits.

torch tags the operators that draw (`torch.Tag.nondeterministic_seeded`), with a generator of their own or without. A
draw is one of forward within a module, or in code of functions once anything was computed of a parameter: what was
drawn before are initial values and data. Draws of Python's `random` and of numpy are not seen.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_file

from harness.engines.calls.callers import caller
from harness.protocols import Value
from harness.recording.naming import Paths
from harness.subject import NamedSubject, called
from harness.torch_internals.autograd import current_task
from harness.torch_internals.modes import DispatchMode, FakeTensor, leaves, take_themselves_apart

_SEPARATOR = "|"
_DROPOUT = frozenset({"bernoulli_", "native_dropout"})
_FUSED = "scaled_dot_product"
"""Attention is tagged too, and draws only where it drops."""
_CALL = "_call_impl"
"""The function of nn.Module's file in which its forward runs."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """One draw: the operator, the user's line "file:line", the path of the module, a hash of what was drawn."""

    operator: str
    place: str
    module: str
    bits: str
    forward: bool

    def __str__(self) -> str:
        where = f"{self.place} in module {self.module}" if self.module else self.place
        return f"{'Tensor' if self.operator.endswith('_') else 'torch'}.{self.operator} at {where}"

    @property
    def written(self) -> str:
        """The draw as a name of an outcome."""
        return _SEPARATOR.join((self.operator, self.place, self.module, self.bits, str(int(self.forward))))

    @classmethod
    def read(cls, name: str) -> Numbers:
        """The draw that a name stands for."""
        operator, place, module, bits, forward = name.split(_SEPARATOR)
        return cls(operator, place, module, bits, forward == "1")


@dataclass(frozen=True, slots=True)
class Drawing:
    """A subject whose outcome is the names of its draws on this rank; those of dropout where `dropout`."""

    subject: NamedSubject
    dropout: bool

    def __getattr__(self, attribute: str) -> Any:
        """Any other attribute is the subject's."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Value]:
        """Run the subject and return a name for each draw."""
        with DrawnNumbers(dropout=self.dropout) as probe:
            called(self.subject.call, case, device)
        return {one.written: torch.ones(()) for one in probe.found}


class DrawnNumbers(DispatchMode):
    """Notes the draws of its thread in `found`, in their order and but for those of backward; with or without those of
    dropout.
    """

    def __init__(self, *, dropout: bool) -> None:
        super().__init__()
        self.found: list[Numbers] = []
        self._dropout = dropout
        self._computed = False
        self._paths = Paths()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operator's result, as it is."""
        if take_themselves_apart(types):
            return NotImplemented
        result = operator(*args, **(kwargs or {}))
        name = operator.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in operator.tags and _FUSED not in name and current_task() < 0:
            self._note(name, [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)])
        elif not self._computed and torch.is_grad_enabled():
            self._computed = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves((args, kwargs)))
        return result

    def _note(self, operator: str, drawn: list[Tensor]) -> None:
        drops = operator in _DROPOUT
        if (drops and not self._dropout) or any(isinstance(one, FakeTensor) for one in drawn):
            return
        if drops and all(bool((one == one.flatten()[:1]).all()) for one in drawn):
            return  # a rate of 0 drops nothing
        around = self._module()
        bits = hashlib.sha256(b"".join(_bytes(one) for one in drawn)).hexdigest()
        self.found.append(Numbers(operator, caller(), around or "", bits, around is not None or self._computed))

    def _module(self) -> str | None:
        """The path of the module whose forward runs, None outside of all."""
        inner: nn.Module | None = None
        outer: nn.Module | None = None
        frame = sys._getframe(1)
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_name == _CALL and frame.f_code.co_filename == module_file.__file__:
                outer = frame.f_locals["self"]
                inner = inner if inner is not None else outer
        if inner is None or outer is None:
            return None
        self._paths.add(outer)
        return self._paths.module(inner, "")


def _bytes(tensor: Tensor) -> bytes:
    """Shape and bits of a tensor."""
    words = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return str(tuple(tensor.shape)).encode() + words.numpy().tobytes()
