"""What every module of a model was given and returned in the first step, call by call, and the gradients of it.

`Capture` keeps one micro-batch, to be held against full tensors whose layout a subject declares. Here every call of
step 0 is kept, with its inputs and without any layout, for whoever compares two programs module by module. A DTensor
is kept as the blocks that it declares, and the ranks of its mesh.

    with CallCapture() as capture:
        ...  # in the thread of each rank: with capture.on_rank(rank): program(rank)
    capture.calls(0).outputs["layers.0.mlp"][0].blocks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from harness.ledger import AGAIN
from harness.outcome.blocks import Block, blocks
from harness.recording.attribution import Attribution
from harness.recording.capturing.capture import first_tensor
from harness.recording.observations import read
from harness.recording.watch import Emit, ThreadWatch, Watch
from harness.torch_internals.autograd import has_hooks

__all__ = ["CallCapture", "Held", "ModuleCalls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A copy of one tensor of a rank. `mesh` are the ranks over which a DTensor declares it, () for a plain tensor.

    No blocks: it could not be read, or no gradient reached it.
    """

    blocks: tuple[Block, ...] = ()
    mesh: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCalls:
    """Module path -> its calls in step 0. `outputs` stands in the order in which modules first returned.

    An output is the first tensor of what a module returned, `gradients` are the gradients in it. `inputs` are all
    tensors that a call was given, `input_gradients` the gradients in the first of them. `plain` are the modules of
    classes of torch.nn without hooks, which never communicate, `linear` those that own a parameter of several dims.
    """

    outputs: Mapping[str, tuple[Held, ...]]
    inputs: Mapping[str, tuple[tuple[Held, ...], ...]]
    gradients: Mapping[str, tuple[Held, ...]]
    input_gradients: Mapping[str, tuple[Held, ...]] = field(default_factory=dict)
    plain: frozenset[str] = frozenset()
    linear: frozenset[str] = frozenset()


class _Rank:
    """What one rank has given so far, by module path."""

    def __init__(self) -> None:
        self.attribution = Attribution()
        self.outputs: dict[str, list[Held]] = {}
        self.inputs: dict[str, list[tuple[Held, ...]]] = {}
        self.gradients: dict[str, list[Tensor | None]] = {}
        self.input_gradients: dict[str, list[Tensor | None]] = {}
        self.hooked: dict[str, int] = {}
        self.plain: set[str] = set()
        self.linear: set[str] = set()

    def calls(self) -> ModuleCalls:
        return ModuleCalls(
            outputs={path: tuple(held) for path, held in self.outputs.items()},
            inputs={path: tuple(held) for path, held in self.inputs.items()},
            gradients={path: tuple(map(_held, found)) for path, found in self.gradients.items()},
            input_gradients={path: tuple(map(_held, found)) for path, found in self.input_gradients.items()},
            plain=frozenset(self.plain),
            linear=frozenset(self.linear),
        )


class CallCapture:
    """Copies what every named module is given and returns in step 0; the model itself (path "") is left out."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._watch = Watch(self._emit, self._output, on_input=self._input)

    def __enter__(self) -> Self:
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, trace)

    def on_rank(self, rank: int) -> AbstractContextManager[None]:
        """To be entered in the thread that runs a rank's program."""
        return self._watch.on_rank(rank)

    def calls(self, rank: int) -> ModuleCalls:
        """What was captured on this rank. Call it inside the rank: a DTensor's gradient is read here."""
        return self._of(rank).calls()

    def _of(self, rank: int) -> _Rank:
        return self._ranks.setdefault(rank, _Rank())

    def _emit(self, rank: int) -> Emit:
        feed = self._of(rank).attribution.feed
        return lambda plain: feed(read(plain))

    def _site(self, lane: ThreadWatch, module: nn.Module) -> tuple[_Rank, str, str]:
        """The rank, the module's path ("" when it does not count) and the phase."""
        rank = self._of(lane.rank)
        site = rank.attribution.current(lane.number)
        return rank, rank.attribution.paths.module(module, "") if site.step == 0 else "", site.phase

    def _input(self, lane: ThreadWatch, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        rank, path, phase = self._site(lane, module)
        if path and phase == "forward":
            given = list(_tensors((args, kwargs)))
            rank.inputs.setdefault(path, []).append(tuple(_held(_copy(tensor)) for tensor in given))
            slots = rank.input_gradients.setdefault(path, [])
            slots.append(None)
            if given and given[0].requires_grad:
                given[0].register_hook(_keeping(slots, len(slots) - 1))

    def _output(self, lane: ThreadWatch, module: nn.Module, output: Any) -> None:
        rank, path, phase = self._site(lane, module)
        tensor = first_tensor(output) if path else None
        if tensor is None:
            return
        if phase == "forward":
            rank.outputs.setdefault(path, []).append(_held(_copy(tensor)))
            rank.gradients.setdefault(path, []).append(None)
            if type(module).__module__.startswith("torch.nn.modules.") and not has_hooks(module):
                rank.plain.add(path)
            if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
                rank.linear.add(path)
        elif phase != AGAIN:
            return
        number = rank.hooked.get(path, 0)
        if tensor.requires_grad and number < len(rank.gradients.get(path, ())):
            rank.hooked[path] = number + 1  # without a graph in the first forward it is the recomputed tensor
            tensor.register_hook(_keeping(rank.gradients[path], number))


def _keeping(slots: list[Tensor | None], number: int) -> Callable[[Tensor], None]:
    """The hook that keeps a copy of the gradient it sees and returns nothing, so that it changes nothing."""

    def keep(gradient: Tensor) -> None:
        before, copy = slots[number], _copy(gradient)
        slots[number] = copy if before is None else before + copy

    return keep


def _copy(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.detach().clone()


def _held(tensor: Tensor | None) -> Held:
    """The tensor as blocks; none of them for what is no tensor of numbers."""
    if tensor is None:
        return Held()
    try:
        with torch.no_grad():
            found = blocks(tensor)
    except (ValueError, TypeError, RuntimeError):
        return Held()
    mesh = getattr(tensor, "device_mesh", None)
    return Held(blocks=found, mesh=() if mesh is None else tuple(mesh.mesh.flatten().tolist()))


def _tensors(given: object, levels: int = 3) -> Iterator[Tensor]:
    """The tensors among arguments: themselves, or inside tuples, lists and mappings."""
    if isinstance(given, Tensor):
        yield given
    elif levels and isinstance(given, (tuple, list, Mapping)):
        for part in given.values() if isinstance(given, Mapping) else given:
            yield from _tensors(part, levels - 1)
