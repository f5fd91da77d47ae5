"""Records gradients, their clipping, and the results of an optimizer in a recorded program.

Gradients are recorded when they are clipped, and as the optimizer receives them when its step begins. A parameter of an
optimizer that is in no module (a master copy, a flat buffer) belongs to a module's parameter with the same memory, or
of which it is the master; otherwise it has no name.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardproof.harness.programs.tensors.layouts import Split, find_place_in, split_of_master, split_value, tensors_in
from shardproof.harness.programs.tensors.names import ModulePath, NamedParameter, Names
from shardproof.harness.programs.tensors.store import StepValues
from shardproof.harness.torch_internals.lookup import replace_function


class _Held(NamedTuple):
    """A tensor of an optimizer: its name, how tensors of its shape are split, and its parameter in a module."""

    place: ModulePath
    split: Split
    named: NamedParameter | None
    tensor: Tensor


_NOWHERE = ModulePath("", "")


@dataclass(slots=True, kw_only=True)
class UpdateValues:
    """Records into `store`. After a step `covered` says that no trained parameter waits for an optimizer."""

    store: StepValues
    names: Names
    _optimizers: dict[int, Any] = field(default_factory=dict)
    _masters: dict[int, NamedParameter] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)
    _received: set[str] = field(default_factory=set)
    _freed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _losses: int = 0
    _norms: int = 0

    def begin_step(self) -> None:
        """A step begins."""
        self._losses = self._norms = 0
        for kept in (self._optimizers, self._masters, self._taken, self._received, self._freed):
            kept.clear()

    def keep_loss(self, tensor: Tensor) -> None:
        """Keep the value of a single number, from which a loss may be made after its memory has been freed."""
        if tensor.numel() == 1 and not any(one is tensor for one, _ in self._freed):
            self._freed.append((tensor, tensor.detach().clone()))

    def take_losses(self, tensors: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Record the losses: the single numbers among the tensors from which backward begins.

        The stages of a pipeline begin from larger tensors. The memory of either may have been freed already: then the
        value of a loss is the one that was kept (`keep_loss`), and only the gradient shows the shape of a larger one.
        """
        for tensor, gradient in zip(tensors, gradients, strict=True):
            if not isinstance(tensor, Tensor) or tensor.numel() != 1:
                continue
            if gradient is not None and gradient.shape != tensor.shape:
                continue
            self.store.add(self.store.make_row("loss", _NOWHERE, call=self._losses), self._value_of(tensor))
            self._losses += 1

    def _value_of(self, loss: Tensor) -> Tensor:
        """The value of a loss. It may be a multiple of numbers whose memory was freed, as Megatron scales one: then it
        is that multiple of the values that were kept.
        """
        if not self._freed or not loss.requires_grad:
            return loss
        numbers = [tensor for tensor, _ in self._freed]
        found = torch.autograd.grad(loss, numbers, torch.ones_like(loss), retain_graph=True, allow_unused=True)
        used = [
            (*kept, factor.flatten()) for kept, factor in zip(self._freed, found, strict=True) if factor is not None
        ]
        if not used:
            return loss
        # A loss that has other terms too is what it is now.
        if all(number.numel() == 1 for number, _, _ in used):
            now = torch.stack([number.detach().flatten() * factor for number, _, factor in used]).sum(0)
            if not torch.allclose(now, loss.detach().flatten(), equal_nan=True):
                return loss
        self._freed = [kept for kept, factor in zip(self._freed, found, strict=True) if factor is None]
        return torch.stack([value.flatten() * factor for _, value, factor in used]).sum(0).reshape(loss.shape)

    def take_gradients(self, parameters: Iterable[Tensor]) -> None:
        """These parameters' gradients are about to be clipped."""
        for found in self._of_optimizer([list(parameters)]):
            self._take_gradient("grad", found)

    def take_norm(self, norm: object) -> None:
        """Clipping has found this norm."""
        if isinstance(norm, float | int):
            norm = torch.tensor(float(norm), dtype=torch.float64)
        for _place, tensor in tensors_in(norm):
            self.store.add(self.store.make_row("norm", _NOWHERE, call=self._norms), tensor)
        self._norms += 1

    def take_received(self, optimizer: Any) -> None:
        """An optimizer's step begins."""
        self._optimizers[id(optimizer)] = optimizer
        for found in self._of_optimizer(group["params"] for group in optimizer.param_groups):
            word = found.place.name or found.place.wrapped
            if word not in self._received:
                self._received.add(word)
                self._take_gradient("grad_clipped" if word in self._taken else "grad", found)

    @property
    def covered(self) -> bool:
        """Whether optimizers that have stepped hold all parameters that require a gradient, and no other tensors."""
        stepped = {id(p) for one in self._optimizers.values() for group in one.param_groups for p in group["params"]}
        return stepped <= self.names.parameters.keys() and all(
            id(one.tensor) in stepped for one in self.names.listed if one.tensor.requires_grad
        )

    def take_after(self) -> None:
        """The step is over: record the values of the parameters and the states of the optimizers."""
        for one in self.names.listed:
            if one.tensor.requires_grad:
                self.store.add(self.store.make_row("param_after", one.place), one.tensor, one.split)
        for optimizer in self._optimizers.values():
            for found in self._of_optimizer(group["params"] for group in optimizer.param_groups):
                for leaf, state in tensors_in(optimizer.state.get(found.tensor)):
                    self.store.add(self.store.make_row("state_after", found.place, leaf=leaf), state, found.split)

    def _take_gradient(self, kind: str, found: _Held) -> None:
        gradient, word = found.tensor.grad, found.place.name or found.place.wrapped
        if gradient is None and found.named is not None:
            gradient = getattr(found.named.tensor, "main_grad", None)  # Megatron's engines accumulate there
        if gradient is not None and (kind != "grad" or word not in self._taken):
            self._taken.add(word)
            self.store.add(self.store.make_row(kind, found.place), gradient, found.split)

    def _of_optimizer(self, groups: Iterable[Iterable[Tensor]]) -> Iterator[_Held]:
        for number, group in enumerate(groups):
            for at, tensor in enumerate(group):
                named = self.names.parameters.get(id(tensor))
                if named is not None:
                    yield _Held(named.place, named.split, named, tensor)
                elif (master := self._find_master(tensor)) is not None:
                    yield _Held(master.place, split_of_master(master.tensor, tensor, master.split), master, tensor)
                else:
                    yield _Held(ModulePath("", f"optimizer/{number}/{at}"), split_value, None, tensor)

    def _find_master(self, tensor: Tensor) -> NamedParameter | None:
        """The parameter of a module whose master copy this is, or in whose memory it lies."""
        if not self._masters:
            for named in self.names.parameters.values():
                self._masters[id(getattr(named.tensor, "main_param", named.tensor))] = named
        if (found := self._masters.get(id(tensor))) is not None:
            return found
        known = self.names.parameters.values()
        return next((named for named in known if find_place_in(named.tensor, tensor) is not None), None)


def watch_clipping(before: Callable[[Any], object], norm: Callable[[object], object]) -> None:
    """Have `before(parameters)` and `norm(total)` called around clipping by the functions of torch.nn.utils.

    The functions are replaced in torch; a module that imported one before keeps the original.
    """
    for name in ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"):
        original = getattr(torch.nn.utils, name, None)
        if original is not None:
            replace_function(original, _wrap_clipping(original, before, norm), "torch.nn.utils")


def _wrap_clipping(original: Any, before: Callable[[Any], object], norm: Callable[[object], object]) -> Any:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **words: Any) -> Any:
        if not isinstance(parameters, Tensor):
            parameters = list(parameters)  # a generator can be read once
        before([parameters] if isinstance(parameters, Tensor) else parameters)
        total = original(parameters, *args, **words)
        if total is None and original.__name__ == "clip_grads_with_norm_":
            total = words.get("total_norm", args[1] if len(args) > 1 else None)
        if total is not None:
            norm(total)
        return total

    return clip


def watch_clipping_of_fsdp(before: Callable[[Any], object], norm: Callable[[object], object]) -> None:
    """The same for FSDP1's method, once the program has imported it."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is None:
        return
    original = kind.clip_grad_norm_

    @functools.wraps(original)
    def clip_grad_norm_(module: Any, *args: Any, **words: Any) -> Any:
        before(list(module.parameters()))
        total = original(module, *args, **words)
        norm(total)
        return total

    kind.clip_grad_norm_ = clip_grad_norm_
