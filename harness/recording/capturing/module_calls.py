"""Activations and their gradients, captured from outside: what modules were given and returned, and what flowed back.

A gradient is taken by a hook on the tensor, which adds no node to the graph and hands nothing on. So results stay the
same bits. Captured are copies on the rank's device. Under reentrant checkpointing, where the first forward makes no
graph, the gradient is that of the recomputed tensor. The model itself, whose path is "", is left out.

    with Capture() as capture:
        ...  # in the thread of each rank: with capture.on_rank(rank): program(rank)
    capture.outputs(0)["layers.0.mlp"], capture.gradients(0)["layers.0.mlp"]

`Capture` keeps one micro-batch, to be held against full tensors whose layout a subject declares. `CallCapture` keeps
every call of step 0, with its inputs and without any layout, for whoever compares two programs module by module:
`capture.calls(0).outputs["layers.0.mlp"][0].blocks`. A DTensor is kept there as the blocks that it declares, and the
ranks of its mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from harness.ledger import AGAIN
from harness.outcome.blocks import Block, blocks
from harness.recording.attribution import Attribution
from harness.recording.lanes import Site
from harness.recording.module_watch import Emit, OnInput, OnOutput, ThreadWatch
from harness.recording.observations import read
from harness.recording.watch import Watch
from harness.torch_internals.autograd import has_hooks


class _ModuleWatch:
    """Hears of every call of a module on every rank, and knows where it belongs."""

    def __init__(self, on_output: OnOutput, on_input: OnInput | None = None) -> None:
        self._attributions: dict[int, Attribution] = {}
        self._watch = Watch(self._emit, on_output, on_input=on_input)

    def __enter__(self) -> Self:
        self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.__exit__()

    def on_rank(self, rank: int) -> AbstractContextManager[None]:
        """To be entered in the thread that runs a rank's program."""
        return self._watch.on_rank(rank)

    def _place(self, lane: ThreadWatch, module: nn.Module) -> tuple[Site, str]:
        """Where a call of a module belongs, and the module's path."""
        attribution = self._attributions[lane.rank]
        return attribution.current(lane.number), attribution.paths.module(module, "")

    def _emit(self, rank: int) -> Emit:
        feed = self._attributions.setdefault(rank, Attribution()).feed
        return lambda plain: feed(read(plain))


class _Captured:
    """Captures of one rank so far, by module path."""

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor | None] = {}


class Capture(_ModuleWatch):
    """Copies the output of every named module, of the micro-batches that `wanted(step, microbatch)` chooses.

    The default is the first micro-batch of the first step. Of several calls of one module the first counts, of an
    output of several tensors the first tensor; gradients of several backwards add up.
    """

    def __init__(self, wanted: Callable[[int, int], bool] = lambda step, microbatch: step == microbatch == 0) -> None:
        super().__init__(self._output)
        self._wanted = wanted
        self._ranks: dict[int, _Captured] = {}

    def outputs(self, rank: int) -> dict[str, Tensor]:
        """Module path -> what the module returned on this rank, detached; empty for a rank that called none."""
        return dict(self._of(rank).outputs)

    def gradients(self, rank: int) -> dict[str, Tensor]:
        """Module path -> the gradient of that output; modules without one are left out."""
        return {path: found for path, found in self._of(rank).gradients.items() if found is not None}

    def _of(self, rank: int) -> _Captured:
        return self._ranks.setdefault(rank, _Captured())

    def _output(self, lane: ThreadWatch, module: nn.Module, output: Any) -> None:
        site, path = self._place(lane, module)
        tensor = first_tensor(output) if path and self._wanted(site.step, site.microbatch) else None
        if tensor is None:
            return
        captured = self._of(lane.rank)
        if site.phase == "forward" and path not in captured.outputs:
            captured.outputs[path] = _copy(tensor)
        elif path in captured.gradients or site.phase != AGAIN:
            return
        if tensor.requires_grad:
            captured.gradients[path] = None
            tensor.register_hook(_keeping(captured.gradients, path))


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
    """Captures of one rank so far, by module path; gradients by the number of the call."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[Held]] = {}
        self.inputs: dict[str, list[tuple[Held, ...]]] = {}
        self.gradients: dict[str, dict[int, Tensor | None]] = {}
        self.input_gradients: dict[str, dict[int, Tensor | None]] = {}
        self.hooked: dict[str, int] = {}
        self.plain: set[str] = set()
        self.linear: set[str] = set()


class CallCapture(_ModuleWatch):
    """Copies what every named module is given and returns in step 0."""

    def __init__(self) -> None:
        super().__init__(self._output, self._input)
        self._ranks: dict[int, _Rank] = {}

    def calls(self, rank: int) -> ModuleCalls:
        """Captures on this rank, to be read inside the rank: a DTensor's gradient is read here."""
        mine = self._of(rank)
        return ModuleCalls(
            outputs={path: tuple(held) for path, held in mine.outputs.items()},
            inputs={path: tuple(held) for path, held in mine.inputs.items()},
            gradients={path: tuple(map(_held, found.values())) for path, found in mine.gradients.items()},
            input_gradients={path: tuple(map(_held, found.values())) for path, found in mine.input_gradients.items()},
            plain=frozenset(mine.plain),
            linear=frozenset(mine.linear),
        )

    def _of(self, rank: int) -> _Rank:
        return self._ranks.setdefault(rank, _Rank())

    def _input(self, lane: ThreadWatch, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        site, path = self._place(lane, module)
        if path and site.step == 0 and site.phase == "forward":
            rank, given = self._of(lane.rank), list(_tensors((args, kwargs)))
            rank.inputs.setdefault(path, []).append(tuple(_held(_copy(tensor)) for tensor in given))
            slots = rank.input_gradients.setdefault(path, {})
            slots[len(slots)] = None
            if given and given[0].requires_grad:
                given[0].register_hook(_keeping(slots, len(slots) - 1))

    def _output(self, lane: ThreadWatch, module: nn.Module, output: Any) -> None:
        site, path = self._place(lane, module)
        tensor = first_tensor(output) if path and site.step == 0 else None
        if tensor is None:
            return
        rank = self._of(lane.rank)
        if site.phase == "forward":
            slots = rank.gradients.setdefault(path, {})
            rank.outputs.setdefault(path, []).append(_held(_copy(tensor)))
            slots[len(slots)] = None
            if type(module).__module__.startswith("torch.nn.modules.") and not has_hooks(module):
                rank.plain.add(path)
            if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
                rank.linear.add(path)
        elif site.phase == AGAIN:
            slots = rank.gradients.get(path, {})
        else:
            return
        number = rank.hooked.get(path, 0)
        if tensor.requires_grad and number < len(slots):
            rank.hooked[path] = number + 1  # without a graph in the first forward it is the recomputed tensor
            tensor.register_hook(_keeping(slots, number))


def _keeping(slots: dict[Any, Tensor | None], key: object) -> Callable[[Tensor], None]:
    """The hook that adds a copy of the gradient it sees to a slot and returns nothing, so that it changes nothing."""

    def keep(gradient: Tensor) -> None:
        before, copy = slots[key], _copy(gradient)
        slots[key] = copy if before is None else before + copy

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


def first_tensor(output: Any) -> Tensor | None:
    """The first tensor of an output: itself, or the first in a tuple, list or mapping."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return next((found for part in output if (found := first_tensor(part)) is not None), None)
    return None


def _tensors(given: object, levels: int = 3) -> Iterator[Tensor]:
    """The tensors among arguments: themselves, or inside tuples, lists and mappings."""
    if isinstance(given, Tensor):
        yield given
    elif levels and isinstance(given, (tuple, list, Mapping)):
        for part in given.values() if isinstance(given, Mapping) else given:
            yield from _tensors(part, levels - 1)
