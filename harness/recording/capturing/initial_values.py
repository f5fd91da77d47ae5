"""Values of parameters before the first step, of a program that does not return them.

A parameter is a leaf that takes a gradient. Code makes, casts and sets it, mostly outside of autograd, and then only
the optimizer writes to it. So training begins with the value that an operator reads first while autograd records, or
that stands when there first is a gradient. A dispatch mode sees that. Of functional programs, whose parameters are no
leaves, nothing is seen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardproof.harness.protocols import Value
from shardproof.harness.subject import NamedSubject, called
from shardproof.harness.torch_internals.autograd import current_task
from shardproof.harness.torch_internals.memory import storage_id
from shardproof.harness.torch_internals.modes import DispatchMode, FakeTensor, leaves, take_themselves_apart
from shardproof.harness.torch_internals.operators import written_arguments

STARTED = "started/"
"""Begin of the names under which first values travel in an outcome."""
_NEARER = 0.5
"""A value of this share of the distance of any other one is that of the parameter."""


class FirstValues(DispatchMode):
    """Notes each leaf that takes a gradient, as an operator of its thread is first given it, and calls `on_leaf`."""

    def __init__(self, on_leaf: Callable[[Tensor], object] = lambda leaf: None) -> None:
        super().__init__()
        self._on_leaf = on_leaf
        self._noted: dict[tuple[object, ...], tuple[torch.UntypedStorage, Tensor]] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operator's result, as it is."""
        reads = (
            torch.is_grad_enabled()
            and not written_arguments(operator)
            and operator is not torch.ops.aten.detach.default
        )
        in_forward = current_task() < 0  # backward makes leaves of the tensors that forward saved
        for leaf in leaves((args, kwargs)) if in_forward else ():
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf and (reads or leaf.grad is not None):
                own = leaf.to_local() if hasattr(leaf, "to_local") else leaf
                if isinstance(own, FakeTensor):
                    continue
                place = storage_id(own), own.storage_offset(), tuple(own.shape)  # parameters may share a storage
                if place not in self._noted:
                    kept = own.untyped_storage()  # so that no other memory takes its number
                    self._noted[place] = kept, own.detach().clone()
                    self._on_leaf(leaf)
        return NotImplemented if take_themselves_apart(types) else operator(*args, **(kwargs or {}))

    @property
    def found(self) -> dict[str, Tensor]:
        """The values as names of an outcome."""
        return {f"{STARTED}{number}": value for number, (_, value) in enumerate(self._noted.values())}


@dataclass(frozen=True, slots=True)
class WithFirstValues:
    """A subject whose outcome has the first values of its parameters too (see `first_values`)."""

    subject: NamedSubject

    def __getattr__(self, attribute: str) -> Any:
        """Any other attribute is the subject's."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Value]:
        """The subject's outcome and the first values."""
        with FirstValues() as probe:
            outcome = called(self.subject.call, case, device)
        return {**outcome, **probe.found}


def first_values(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a program itself, and parameter -> its value before the first step, where it is known.

    A parameter is returned after a step as `param_after/0/<name>` or `param/<name>`. Its first value is the one of its
    shape that is nearest to that, by far: steps are small beside the differences between parameters.
    """
    values = [tensor for name, tensor in tensors.items() if name.startswith(STARTED)]
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(STARTED)}
    after = {name.removeprefix("param/"): tensor for name, tensor in own.items() if name.startswith("param/")}
    after |= {name.split("/", 2)[2]: own[name] for name in own if name.startswith("param_after/0/")}
    nearest = {name: _nearest(tensor, values) for name, tensor in after.items()}
    return own, {name: value for name, value in nearest.items() if value is not None}


def _nearest(after: Tensor, values: Sequence[Tensor]) -> Tensor | None:
    """The value that is nearest by far; None without one."""
    alike = [value for value in values if value.shape == after.shape and value.is_floating_point()]
    if not alike or not after.is_floating_point():
        return None
    gaps = [float((value.double() - after.double()).norm()) for value in alike]
    first = min(range(len(alike)), key=gaps.__getitem__)
    others = [gap for gap, value in zip(gaps, alike, strict=True) if not torch.equal(value, alike[first])]
    return alike[first] if all(gaps[first] <= _NEARER * other for other in others) else None
