"""Numbers that a program draws and does not return: dropout masks, recorded or replaced, and initial parameters.

torch draws a mask by `aten.bernoulli_` (nn.Dropout and its kin, F.dropout, scaled_dot_product_attention's own formula)
or within `aten.native_dropout` (GPUs). A dispatch mode sees both, and of a DTensor where its part lies. Masks that a
program makes by `torch.rand`, or inside a fused attention kernel, are not seen.

A parameter is a leaf that requires a gradient. Code creates, casts and sets it, and from the first backward on only the
optimizer writes to it. A model may be called before its weights are loaded. So the initial value of a parameter is the
last one that an operator reads, while autograd records, before the first backward. If none reads it before, it is the
first value that is read later, or that it has when a gradient arrives. A dispatch mode sees all of these. A program may
create new leaves in every step, as `w = (w - lr * gradient).detach().requires_grad_()` does: a leaf that is computed
from earlier ones is a later value. Functional programs, whose parameters are no leaves, show nothing; then the ranks'
first values stand for those of the truth.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardproof.harness.engines.calls.callers import caller
from shardproof.harness.outcome.blocks import Block, blocks
from shardproof.harness.outcome.merging import same_bits
from shardproof.harness.protocols import Value
from shardproof.harness.subject import NamedSubject, call_subject
from shardproof.harness.torch_internals.autograd import current_task, numbers_of, storage_id
from shardproof.harness.torch_internals.dispatch import (
    DispatchMode,
    FakeTensor,
    leaves,
    take_themselves_apart,
    written_arguments,
)

aten = torch.ops.aten
_BERNOULLI, _NATIVE = aten.bernoulli_.float, aten.native_dropout.default
_FORWARD, _BACKWARD = "dropout.drawn", "dropout.drawn_anew"


class Draw(NamedTuple):
    """A mask as a rank drew it: bool blocks of the tensor it was drawn for, the rate, the user's line, "file:line".

    `anew`: it was drawn in backward and in no forward, by a recomputation that does not repeat its forward.
    """

    line: str
    rate: float
    blocks: tuple[Block, ...]
    anew: bool = False


@dataclass(frozen=True, slots=True)
class WithMasks:
    """The subject; its outcome also has the masks that it draws (see `taken_out`).

    With `joint`, these replace its own masks, in the order of the draws; `words` are passed on.
    """

    subject: NamedSubject
    joint: tuple[Tensor, ...] | None = None
    words: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def __getattr__(self, attribute: str) -> Any:
        """Take any other attribute from the subject."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Value]:
        """Run the subject. Returns its outcome and its masks."""
        own: Any = self.subject.call
        call = partial(own, **self.words) if self.words else own
        with DropoutProbe(self.joint) as probe:
            outcome = call_subject(call, case, device)
        return {**outcome, **probe.found}


class DropoutProbe(DispatchMode):
    """Records the masks of its thread in `found`; with `joint`, it replaces those of forwards and records none.

    A recomputation gets the mask of its forward, since it begins with the same state of the generator.
    """

    def __init__(self, joint: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.found: dict[str, tuple[Block, ...]] = {}
        self._joint = joint
        self._masks: dict[bytes, Tensor | None] = {}
        self._forwards = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The result of the operator, with the mask replaced if it draws one."""
        kwargs = kwargs or {}
        draws = operator in (_BERNOULLI, _NATIVE) and not isinstance(args[0], FakeTensor)
        if not draws:
            return NotImplemented if take_themselves_apart(types) else operator(*args, **kwargs)
        state = _state(args[0].device, kwargs.get("generator"))
        result = operator(*args, **kwargs)
        if operator is _BERNOULLI:
            rate, kept = 1 - (args[1] if len(args) > 1 else kwargs.get("p", 0.5)), result
        else:
            rate, kept = args[1], result[1]
        mask = self._note_draw(state, rate, kept)
        if mask is None:
            return result
        if operator is _BERNOULLI:
            return result.copy_(mask.view_as(result))
        mask = mask.view_as(kept).to(kept.device)
        return args[0] * mask * (1 / (1 - rate)), mask

    def _note_draw(self, state: bytes, rate: float, kept: Tensor) -> Tensor | None:
        """Record a draw. Returns the mask that replaces it, or None."""
        backward = current_task() >= 0
        if not backward:
            number, self._forwards = self._forwards, self._forwards + 1
            self._masks[state] = self._joint[number] if self._joint and number < len(self._joint) else None
        if self._joint is None and not (backward and state in self._masks):
            name = f"{_BACKWARD if backward else _FORWARD}/{len(self.found)}/{rate:.12g}/{caller()}"
            self.found[name] = tuple(replace(block, local=block.local != 0) for block in blocks(kept.detach()))
        return self._masks.get(state)


def taken_out(outcome: dict[str, tuple[Block, ...]]) -> tuple[dict[str, tuple[Block, ...]], tuple[Draw, ...]]:
    """The outcome of the subject itself, and the masks that DropoutProbe found, in the order of drawing."""
    draws = []
    for name, found in outcome.items():
        kind, _, rest = name.partition("/")
        if kind in (_FORWARD, _BACKWARD):
            _, rate, line = rest.split("/", 2)
            draws.append(Draw(line, float(rate), found, anew=kind == _BACKWARD))
    own = {name: found for name, found in outcome.items() if name.partition("/")[0] not in (_FORWARD, _BACKWARD)}
    return own, tuple(draws)


def _state(device: torch.device, generator: torch.Generator | None) -> bytes:
    """The random state from which a draw on this device begins."""
    if generator is None and device.type == "cuda":
        return torch.cuda.get_rng_state(device).numpy().tobytes()
    return (torch.get_rng_state() if generator is None else generator.get_state()).numpy().tobytes()


STARTED = "started/"
"""The beginning of names under which first values are returned in an outcome."""
_NEARER = 0.5
"""The nearest value is the parameter's if its distance is at most this share of the distance of any other one."""


class FirstValues(DispatchMode):
    """Records the first values of leaves that require a gradient; calls `on_leaf` when an operator first reads one."""

    def __init__(self, on_leaf: Callable[[Tensor], object] = lambda leaf: None) -> None:
        super().__init__()
        self._on_leaf = on_leaf
        self._noted: dict[tuple[object, ...], tuple[torch.UntypedStorage, Tensor]] = {}
        self._later: set[tuple[object, ...]] = set()
        self._leaves: set[int] = set()
        self._computed: set[int] = set()
        """The storages of tensors computed from leaves, without those of the leaves."""
        self._trains = False
        """Whether a backward has run."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The result of the operator, unchanged."""
        # Gradients are off in the forward of a Function too; initialisation ends before the first leaf is used.
        begun = torch.is_grad_enabled() or bool(self._leaves)
        reads = begun and not written_arguments(operator) and operator is not torch.ops.aten.detach.default
        in_forward = current_task() < 0  # backward makes leaves of the tensors that forward saved
        self._trains = self._trains or not in_forward
        tensors = [one for one in leaves(args) + leaves(kwargs) if isinstance(one, Tensor)]
        for leaf in tensors if in_forward else ():
            if leaf.requires_grad and leaf.is_leaf and (reads or leaf.grad is not None):
                own = numbers_of(leaf.to_local() if hasattr(leaf, "to_local") else leaf)
                if isinstance(own, FakeTensor):
                    continue
                # Parameters may share a storage, and a square one may be read transposed.
                place = storage_id(own), own.storage_offset(), tuple(own.shape), own.stride()
                if place in self._noted and not self._trains:
                    kept, before = self._noted[place]
                    if not same_bits(own.detach(), before):  # copying at each reading would cost time
                        self._noted[place] = kept, own.detach().clone()
                if place not in self._noted:
                    kept = own.untyped_storage()  # kept alive, so that no other memory gets its number
                    self._noted[place] = kept, own.detach().clone()
                    if place[0] in self._computed:
                        self._later.add(place)
                    self._leaves.add(place[0])
                    self._on_leaf(leaf)
        if take_themselves_apart(types):
            return NotImplemented
        given = {*map(storage_id, tensors)} if self._leaves else set()
        result = operator(*args, **(kwargs or {}))
        if not self._leaves:  # nothing is computed from a leaf yet
            return result
        made = {storage_id(one) for one in leaves(result) if isinstance(one, Tensor)}
        if given.isdisjoint(self._leaves) and given.isdisjoint(self._computed):
            self._computed -= made  # new memory may get the number of freed memory
        else:
            self._computed |= made - self._leaves
        return result

    @property
    def found(self) -> dict[str, Tensor]:
        """The first values as names of an outcome; later values of a parameter only if no first value has their shape.

        They are numbered as all leaves are, in the order in which `on_leaf` is called.
        """
        first = {tuple(value.shape) for place, (_, value) in self._noted.items() if place not in self._later}
        return {
            f"{STARTED}{number}": value
            for number, (place, (_, value)) in enumerate(self._noted.items())
            if place not in self._later or tuple(value.shape) not in first
        }


@dataclass(frozen=True, slots=True)
class WithFirstValues:
    """The subject, with the first values of its parameters in its outcome (see `first_values`)."""

    subject: NamedSubject

    def __getattr__(self, attribute: str) -> Any:
        """Take any other attribute from the subject."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Value]:
        """Run the subject. Returns its outcome and the first values."""
        with FirstValues() as probe:
            outcome = call_subject(self.subject.call, case, device)
        return {**outcome, **probe.found}


def first_values(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The program's own tensors, and parameter -> its value before the first step, if it is known.

    A parameter is returned after a step as `param_after/0/<name>` or `param/<name>`. Its first value is the nearest one
    of its shape by far, since steps are small beside the differences between parameters.
    """
    values = [tensor for name, tensor in tensors.items() if name.startswith(STARTED)]
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(STARTED)}
    after = {name.removeprefix("param/"): tensor for name, tensor in own.items() if name.startswith("param/")}
    after |= {name.split("/", 2)[2]: own[name] for name in own if name.startswith("param_after/0/")}
    nearest = {name: _nearest(tensor, values) for name, tensor in after.items()}
    return own, {name: value for name, value in nearest.items() if value is not None}


def first_blocks(outcome: Mapping[str, Sequence[Block]]) -> dict[str, Block]:
    """Parameter -> the block of its value before the first step, if a rank returns one part of it."""
    single = {name: found[0] for name, found in outcome.items() if len(found) == 1}
    _, values = first_values({name: block.local for name, block in single.items()})
    parts = {name: single.get(f"param_after/0/{name}", single.get(f"param/{name}")) for name in values}
    return {name: replace(part, local=values[name]) for name, part in parts.items() if part is not None}


def _nearest(after: Tensor, values: Sequence[Tensor]) -> Tensor | None:
    """The value that is nearest by far (_NEARER); None if there is none."""
    alike = [value for value in values if value.shape == after.shape and value.is_complex() == after.is_complex()]
    if not alike or not (after.is_floating_point() or after.is_complex()):
        return None
    wide = torch.promote_types(after.dtype, torch.float64)
    gaps = [float((value.to(wide) - after.to(wide)).norm()) for value in alike]
    first = min(range(len(alike)), key=gaps.__getitem__)
    others = [gap for gap, value in zip(gaps, alike, strict=True) if not torch.equal(value, alike[first])]
    return alike[first] if all(gaps[first] <= _NEARER * other for other in others) else None
