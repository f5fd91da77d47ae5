"""Finds the operator that makes a dense model another function in float32 than in float64, if there is one.

The default eps of RMSNorm is that of the dtype, and code may use other numbers of `torch.finfo(x.dtype)`. Such code is
right, and its truth depends on the dtype. A model that draws its weights in the case's dtype has no such operator.

The first forward runs in float64 and in float32, and the operators of both are recorded. Pairs of equal operators in
the same order show where results begin to differ by more than rounding, and why:

    numbers     the operator was given different numbers: an eps, a bound, a value to fill with
    itself      given the same tensors, its results in float32 and float64 differ by more than rounding
    elsewhere   random numbers or constants differ, or one run has operators that the other has not

A difference is followed from operator to operator until it vanishes: two values that fill a mask differ, and their
softmax does not. The last difference of the forward counts.
"""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardproof.harness.engines.calls.callers import caller
from shardproof.harness.outcome.blocks import Block
from shardproof.harness.protocols import Value
from shardproof.harness.recording.capturing.operator_probes import running_module
from shardproof.harness.recording.naming import Paths
from shardproof.harness.subject import NamedSubject, call_subject
from shardproof.harness.torch_internals.autograd import current_task, storage_id
from shardproof.harness.torch_internals.dispatch import (
    DispatchMode,
    FakeTensor,
    leaves,
    makes_new,
    map_leaves,
    take_themselves_apart,
)

_MOST = 2**26
"""The most elements that are kept of a forward. Operators after that are not recorded."""
_EPSILON = float(torch.finfo(torch.float32).eps)
_OWN = 64 * _EPSILON
"""The relative error that rounding explains in one operator."""
_AMPLIFIED = 16
"""Rounding also explains this many times the change of the result when the inputs move by their own rounding."""
_CASTS = frozenset({"_to_copy"})
"""Operators that only one of the runs may have: it casts where the other has the stated dtype already."""
_UNSET = ("empty", "new_empty")


_Results = tuple[list[Tensor], list[Tensor]]


@dataclass(slots=True)
class OperatorStep:
    """An operator of a forward. `numbers` are its scalar arguments, `given` and `made` the storages of the tensors that
    it read and returned, `results` its floating tensors in float64. `random`: it draws random numbers. `own`: given the
    same tensors, its result in float64 differs by more than rounding.
    """

    operator: str
    place: str
    numbers: tuple[float, ...]
    given: tuple[int, ...]
    made: tuple[int, ...]
    results: tuple[Tensor, ...]
    random: bool = False
    own: bool = False


class Forward(DispatchMode):
    """Records the operators of its thread in `steps`, up to the first backward. Those of float32 run in float64 too.

    A tensor of one element that no operator made counts as one of the numbers that an operator is given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[OperatorStep] = []
        self._open, self._elements, self._paths = True, 0, Paths()
        self._made: set[int] = set()
        self._alive: list[Tensor] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record the operator; return its result unchanged."""
        if take_themselves_apart(types):
            return NotImplemented
        words = dict(kwargs or {})
        self._open = self._open and current_task() < 0 and self._elements < _MOST
        if not self._open or any(issubclass(kind, FakeTensor) for kind in types):
            return operator(*args, **words)
        random = torch.Tag.nondeterministic_seeded in operator.tags
        given = [leaf for leaf in leaves((args, words)) if isinstance(leaf, Tensor)]
        # Only an operator without any effect but its result may run a second time.
        pure = "c10d" not in operator.namespace and not random and makes_new(operator)
        wide = _in_float64(operator, args, words) if pure else None
        result = operator(*args, **words)
        made = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        self._note(operator, random, (args, words), given, made, wide)
        return result

    def _note(
        self, operator: Any, random: bool, all_given: Any, given: list[Tensor], made: list[Tensor], wide: Any
    ) -> None:
        constants = [
            float(x) for x in given if x.numel() == 1 and not x.is_complex() and storage_id(x) not in self._made
        ]
        stated = [leaf for leaf in leaves(all_given) if isinstance(leaf, float)]
        floating = [leaf for leaf in made if leaf.is_floating_point() and _is_read(leaf)]
        module = running_module(self._paths)
        name = operator.overloadpacket.__name__
        self.steps.append(
            OperatorStep(
                name,
                caller() + (f" in module {module}" if module else ""),
                (*stated, *constants),
                tuple(map(storage_id, given)),
                tuple(map(storage_id, made)),
                () if name.startswith(_UNSET) else tuple(x.detach().double().clone() for x in floating),
                random,
                wide is not None and _is_off(made, *wide),
            )
        )
        self._elements += sum(leaf.numel() for leaf in floating)
        self._made |= {*map(storage_id, made)}
        self._alive += made  # keeps the numbers of storages unique: that of a freed one is used again


def _is_read(tensor: Tensor) -> bool:
    """Whether a tensor has real numbers to compare."""
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_complex() or tensor.is_quantized)


@dataclass(frozen=True, slots=True)
class ForwardWatched:
    """The subject, with the operators of its first forward as its outcome."""

    subject: NamedSubject

    def __getattr__(self, attribute: str) -> Any:
        """Take any other attribute from the subject."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Value]:
        """Run the subject and return every operator of its first forward."""
        with Forward() as forward:
            call_subject(self.subject.call, case, device)
        found: dict[str, Value] = {}
        for number, step in enumerate(forward.steps):
            facts = step.operator, step.place, step.numbers, step.given, step.made, step.random, step.own
            for result in step.results or (torch.ones(0),):
                found[json.dumps((number, len(found), *facts))] = result
        return found


def steps_of(outcome: Mapping[str, Sequence[Block]]) -> list[OperatorStep]:
    """The first forward that a watched subject returned."""
    steps: dict[int, OperatorStep] = {}
    for name, (block, *_) in outcome.items():
        number, _, operator, place, numbers, given, made, random, own = json.loads(name)
        tensors = tuple(numbers), tuple(given), tuple(made)
        before = steps[number].results if number in steps else ()
        steps[number] = OperatorStep(operator, place, *tensors, (*before, block.local), random, own)
    return list(steps.values())


def _in_float64(operator: Any, args: Sequence[Any], words: Mapping[str, Any]) -> _Results | None:
    """Results in float64 of an operator of float32: of its own arguments, and of arguments moved by their rounding.

    None if no argument is in float32, or the operator does not take float64.
    """
    if not any(isinstance(leaf, Tensor) and leaf.dtype is torch.float32 for leaf in leaves((args, words))):
        return None
    generator = torch.Generator().manual_seed(0)

    def move_dtype(x: Any, by: float) -> Any:
        if x is torch.float32:
            return torch.float64
        if not isinstance(x, Tensor) or x.dtype is not torch.float32:
            return x
        part = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device) - 0.5
        return x.detach().double() * (1 + by * part)

    def results(by: float) -> list[Tensor]:
        found = operator(
            *map_leaves(lambda x: move_dtype(x, by), args), **map_leaves(lambda x: move_dtype(x, by), dict(words))
        )
        return [leaf for leaf in leaves(found) if isinstance(leaf, Tensor)]

    try:
        return results(0.0), results(_EPSILON)
    except Exception:  # an operator, perhaps the user's own, that does not take float64
        return None


def _is_off(made: Sequence[Tensor], wide: Sequence[Tensor], moved: Sequence[Tensor]) -> bool:
    """Whether a result in float32 is further from that in float64 than rounding explains."""
    return any(
        _gap(mine.double(), true) > max(_OWN, _AMPLIFIED * _gap(other, true))
        for mine, true, other in zip(made, wide, moved, strict=False)
        if mine.dtype is torch.float32 and true.is_floating_point() and mine.shape == true.shape and _is_read(mine)
    )


def _gap(value: Tensor, true: Tensor) -> float:
    """The relative distance of two tensors, of the elements that are finite in both."""
    both = value.isfinite() & true.isfinite()
    size = float(true[both].norm())
    gap = float((value[both] - true[both]).norm())
    return gap / size if size else math.inf if gap else 0.0


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a difference came from; `words` is empty if no operator made it."""

    words: str = ""


_ELSEWHERE = _Origin()


@dataclass(slots=True)
class _Differences:
    """The differences between the two runs up to this step: storage of the run in float32 -> origin (`origins`).

    A gap of at most `least` is no difference. `last` is the last origin that was seen. `drawn`: random numbers differ.
    """

    least: float
    origins: dict[int, _Origin] = field(default_factory=dict)
    last: _Origin = _ELSEWHERE
    drawn: bool = False

    def follow(self, step: OperatorStep, found: _Origin | None) -> None:
        """Give the results of this step the origin of its arguments, else `found`; None: they do not differ."""
        before = [self.origins[key] for key in step.given if key in self.origins]
        origin = before[0] if before else found
        for key in step.made:
            self.origins.pop(key, None)
            if origin is not None:
                self.origins[key] = origin
        self.last = origin or self.last

    def compare(self, wide: OperatorStep, narrow: OperatorStep) -> None:
        """Compare the results of a pair of equal operators, and follow a difference."""
        gap = max(
            (_gap(b, a) for a, b in zip(wide.results, narrow.results, strict=False) if a.shape == b.shape), default=0
        )
        if gap <= self.least:
            for key in narrow.made:
                self.origins.pop(key, None)
            return
        self.drawn = self.drawn or narrow.random
        self.follow(narrow, _find_origin(wide, narrow) or _ELSEWHERE)


def _find_origin(wide: OperatorStep, narrow: OperatorStep) -> _Origin | None:
    """The origin of a difference if it is this operator: its numbers or itself. Otherwise None."""
    for mine, true in zip(narrow.numbers, wide.numbers, strict=False):
        if not math.isclose(mine, true, rel_tol=_OWN):
            return _Origin(
                f"{narrow.operator} at {narrow.place} is given {mine:.6g} in float32 and {true:.6g} in float64"
            )
    if narrow.own:
        words = "has another result in float32 than in float64 of the same numbers, by more than rounding"
        return _Origin(f"{narrow.operator} at {narrow.place} {words}")
    return None


def differing_operator(wide: Sequence[OperatorStep], narrow: Sequence[OperatorStep], error: float) -> str:
    """The operator, in words, that makes a forward in float32 differ by `error` from float64; "" if none does."""
    # A gap counts from half-way, in orders of magnitude, between rounding and the error to be explained.
    found = _Differences(math.sqrt(error * _EPSILON))
    names = [step.operator for step in wide], [step.operator for step in narrow]
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *names, autojunk=False).get_opcodes():
        if kind == "equal":
            for one, other in zip(wide[a:b], narrow[c:d], strict=True):
                found.compare(one, other)
            continue
        for step in narrow[c:d]:
            found.follow(step, None if step.operator in _CASTS else _ELSEWHERE)
    return "" if found.drawn else found.last.words
