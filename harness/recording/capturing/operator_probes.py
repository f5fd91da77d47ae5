"""Probes of the operators of a rank by a dispatch mode: random draws, and lower precision.

Draws: each with its operator, line and module, and a hash of its bits. torch tags the operators that draw
(`torch.Tag.nondeterministic_seeded`), with a generator of their own or without. A draw belongs to forward if it is made
within a module, or by functions after something was computed from a parameter. Earlier draws are initial values and
data. Draws of Python's `random` and of numpy are not seen.

Islands: arithmetic in a lower precision than the case's, such as rotary tables, routers, losses in float32, experts in
bfloat16. A tensor of a narrower dtype matters, unless all its numbers are whole, where it enters wider arithmetic: in
an operator that reads it and returns a wider one. The search slows a run, so it is made only if an error of a case is
of the size of rounding to a lower precision. Numbers computed in the case's dtype are rounded on the way, and each side
may add them in another order. Constants (weights that were drawn in float32 and cast, samples, tables) are equal on
both sides, if both have them, and then explain no error.
"""

import functools
import hashlib
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_file

from shardproof.harness.engines.calls.callers import caller
from shardproof.harness.protocols import Value
from shardproof.harness.recording.naming import Paths
from shardproof.harness.subject import NamedSubject, call_subject
from shardproof.harness.torch_internals.autograd import current_task, numbers_of, storage_id
from shardproof.harness.torch_internals.dispatch import DispatchMode, FakeTensor, leaves, take_themselves_apart

_SEPARATOR = "|"
_DROPOUT = frozenset({"bernoulli_", "native_dropout"})
_FUSED = "scaled_dot_product"
"""Attention has the tag too, but draws only with dropout."""
_CALL = "_call_impl"
"""The function of nn.Module's file in which its forward runs."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A draw: the operator, the user's line "file:line", the path of the module, a hash of the numbers."""

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
    def read(cls, name: str) -> "Numbers":
        """The draw that `written` gave this name."""
        operator, place, module, bits, forward = name.split(_SEPARATOR)
        return cls(operator, place, module, bits, forward == "1")


@dataclass(frozen=True, slots=True)
class Probed:
    """The subject, with the `names` that a probe found on this rank as its outcome."""

    subject: NamedSubject
    probe: Callable[[], "DrawnNumbers | NarrowProbe"]

    def __getattr__(self, attribute: str) -> Any:
        """Take any other attribute from the subject."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Value]:
        """Run the subject and return each name."""
        with self.probe() as probe:
            call_subject(self.subject.call, case, device)
        return {name: torch.ones(()) for name in probe.names}


class DrawnNumbers(DispatchMode):
    """Records the draws of its thread in `found`, in their order, without those of backward; with or without those of
    dropout. First values of parameters belong to no forward, even if their model is built during training.
    """

    def __init__(self, *, dropout: bool) -> None:
        super().__init__()
        self.found: list[Numbers] = []
        self._dropout = dropout
        self._computed = False
        self._paths = Paths()

    @property
    def names(self) -> list[str]:
        """The draws, as names of an outcome."""
        return [one.written for one in self.found]

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The result of the operator, unchanged."""
        if take_themselves_apart(types):
            return NotImplemented
        result = operator(*args, **(kwargs or {}))
        name = operator.overloadpacket.__name__
        random = torch.Tag.nondeterministic_seeded in operator.tags and not _is_seed(operator, result)
        if random and _FUSED not in name and current_task() < 0:
            starts = any(isinstance(one, nn.Parameter) for one in args[:1])  # drawn in place: its first value
            self._note(name, [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)], starts=starts)
        elif not self._computed and torch.is_grad_enabled():
            self._computed = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves((args, kwargs)))
        return result

    def _note(self, operator: str, drawn: list[Tensor], *, starts: bool) -> None:
        drops = operator in _DROPOUT
        if (drops and not self._dropout) or any(isinstance(one, FakeTensor) for one in drawn):
            return
        if drops and all(bool((one == one.flatten()[:1]).all()) for one in drawn):
            return  # a rate of 0 drops nothing
        around = running_module(self._paths)
        bits = hashlib.sha256()
        for one in drawn:
            bits.update(str(tuple(one.shape)).encode())
            bits.update(one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        forward = around is not None or (self._computed and not starts)
        self.found.append(Numbers(operator, caller(), around or "", bits.hexdigest(), forward))


def _is_seed(operator: Any, drawn: Any) -> bool:
    """Whether one integer was drawn from the whole range of its dtype: a seed, as a DataLoader draws one, and no number
    of a model. What is drawn from the seed is seen by itself.
    """
    return operator is torch.ops.aten.random_.default and drawn.numel() == 1 and not drawn.is_floating_point()


def running_module(paths: Paths) -> str | None:
    """The path of the module whose forward runs, None outside of all; its outermost module is added to `paths`."""
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
    paths.add(outer)
    return paths.module(inner, "")


_EPSILONS: Mapping[str, float] = {
    name: float(torch.finfo(getattr(torch, name)).eps) for name in ("float64", "float32", "float16", "bfloat16")
}


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
    def read(cls, name: str) -> "Island":
        """The island that an outcome name of a probed run stands for."""
        dtype, operator, place = name.split(_SEPARATOR)
        return cls(dtype=dtype, operator=operator, place=place)


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

    @property
    def names(self) -> list[str]:
        """The islands, as names of an outcome."""
        return list(self.found.values())

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operator's result, as it is."""
        if take_themselves_apart(types):
            return NotImplemented
        result = operator(*args, **(kwargs or {}))
        given, returned = (
            [leaf for leaf in leaves(found) if isinstance(leaf, Tensor) and not leaf.is_mkldnn]
            for found in ((args, kwargs), result)
        )
        widest = min((torch.finfo(leaf.dtype).eps for leaf in returned if leaf.is_floating_point()), default=1.0)
        for leaf in given:
            name = self._narrow.get(leaf.dtype)
            if not name or leaf.dtype in self.found or widest >= _EPSILONS[name]:
                continue
            # Masks and counts, which are whole numbers, are exact in every dtype.
            numbers = numbers_of(leaf)
            if (self._constants or self._is_computed(leaf)) and not torch.equal(numbers, numbers.round()):
                self.found[leaf.dtype] = _SEPARATOR.join((name, str(operator), caller()))
        if any(leaf.dtype == self._wide or self._is_computed(leaf) for leaf in given):
            for leaf in returned:  # computed in the case's dtype for as long as their storage lives
                if leaf.dtype in self._narrow and not self._is_computed(leaf):
                    key = storage_id(leaf)
                    gone = functools.partial(self._on_drop, key)
                    self._computed[key] = weakref.ref(numbers_of(leaf).untyped_storage(), gone)
        return result

    def _is_computed(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._computed

    def _on_drop(self, key: int, _reference: object) -> None:
        del self._computed[key]
