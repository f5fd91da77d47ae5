"""Activations and their gradients, captured from outside: what modules returned, and what flowed back.

A hook on the tensor takes its gradient. It adds no node to the graph and returns nothing, so no bit of a result
changes. Copies stay on the rank's device. Under reentrant checkpointing, where the first forward makes no graph, the
gradient is that of the recomputed tensor. The model itself, whose path is "", is left out.

    with Capture() as capture:
        ...  # in the thread of each rank: with capture.on_rank(rank): program(rank)
    capture.outputs(0)["layers.0.mlp"], capture.gradients(0)["layers.0.mlp"]

A path that several modules have is left out, since it names none of them: if a program calls layers one by one and not
their model, each layer has an "mlp".

To compare two programs module by module, CallCapture has every call of step 0, with its inputs and without any layout:
`capture.calls(0).outputs["layers.0.mlp"][0].blocks`. A DTensor is kept as the blocks that it declares, and the ranks of
its mesh.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.harness.ledger import AGAIN
from shardproof.harness.outcome.blocks import Block, blocks
from shardproof.harness.recording.attribution import Attribution
from shardproof.harness.recording.lanes import Site
from shardproof.harness.recording.observations import read_observation
from shardproof.harness.recording.watch import Emit, OnInput, OnOutput, ThreadWatch, Watch
from shardproof.harness.torch_internals.autograd import has_hooks


class ModuleWatch(Watch):
    """Receives every call of a module on every rank, and says its step, micro-batch and path (`place`)."""

    def __init__(self, on_output: OnOutput, on_input: OnInput | None = None) -> None:
        super().__init__(self._make_emit, on_output, on_input=on_input)
        self._attributions: dict[int, Attribution] = {}
        self._called: dict[tuple[int, str], nn.Module] = {}
        self._shared: set[tuple[int, str]] = set()
        """(rank, path) of paths that several modules have, such as layers of a stage that are called one by one."""

    def place(self, lane: ThreadWatch, module: nn.Module) -> tuple[Site, str]:
        """Step and micro-batch of a call, and the path of its module."""
        attribution = self._attributions[lane.rank]
        path = attribution.paths.module(module, "")
        first = self._called.setdefault((lane.rank, path), module)
        if path and module is not first and not _holds(first, module) and not _holds(module, first):
            self._shared.add((lane.rank, path))
        return attribution.current(lane.number), path

    def names_one(self, rank: int, path: str) -> bool:
        """Whether the modules that were called on this rank under this path are one module and its wrappers."""
        return (rank, path) not in self._shared

    def _make_emit(self, rank: int) -> Emit:
        feed = self._attributions.setdefault(rank, Attribution()).feed
        return lambda plain: feed(read_observation(plain))


def _holds(module: nn.Module, part: nn.Module) -> bool:
    return any(one is part for one in module.modules())


class _Captured:
    """Captures of one rank so far, by module path."""

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor | None] = {}


class Capture(ModuleWatch):
    """Copies the output of every named module, in the micro-batches that `wanted(step, microbatch)` chooses.

    The default is the first micro-batch of the first step. Of several calls of one module the first counts, of an
    output of several tensors the first tensor; gradients of several backwards add up.
    """

    def __init__(self, wanted: Callable[[int, int], bool] = lambda step, microbatch: step == microbatch == 0) -> None:
        super().__init__(self._output)
        self._wanted = wanted
        self._captured: dict[int, _Captured] = {}

    def outputs(self, rank: int) -> dict[str, Tensor]:
        """Module path -> what the module returned on this rank, detached; empty for a rank that called none."""
        return {path: output for path, output in self._of(rank).outputs.items() if self.names_one(rank, path)}

    def gradients(self, rank: int) -> dict[str, Tensor]:
        """Module path -> the gradient of that output; modules without one are left out."""
        known = ((path, grad) for path, grad in self._of(rank).gradients.items() if self.names_one(rank, path))
        return {path: gradient for path, gradient in known if gradient is not None}

    def _of(self, rank: int) -> _Captured:
        return self._captured.setdefault(rank, _Captured())

    def _output(self, lane: ThreadWatch, module: nn.Module, output: Any) -> None:
        site, path = self.place(lane, module)
        tensor = next(tensors_of(output), None) if path and self._wanted(site.step, site.microbatch) else None
        if tensor is None:
            return
        captured = self._of(lane.rank)
        if site.phase == "forward" and path not in captured.outputs:
            captured.outputs[path] = copy_tensor(tensor)
        elif path in captured.gradients or site.phase != AGAIN:
            return
        if tensor.requires_grad:
            captured.gradients[path] = None
            tensor.register_hook(make_keeping_hook(captured.gradients, path))


def make_keeping_hook(slots: dict[Any, Tensor | None], key: object) -> Callable[[Tensor], None]:
    """A hook that adds a copy of the gradient to a slot. It returns nothing, so it changes nothing."""

    def keep(gradient: Tensor) -> None:
        before, copy = slots[key], copy_tensor(gradient)
        slots[key] = copy if before is None else before + copy

    return keep


def copy_tensor(tensor: Tensor) -> Tensor:
    """A copy without a graph."""
    with torch.no_grad():
        return tensor.detach().clone()


def tensors_of(given: object, levels: int = 16) -> Iterator[Tensor]:
    """The tensors among arguments or results: alone, or in tuples, lists and mappings, nested as deep as this."""
    if isinstance(given, Tensor):
        yield given
    elif levels and isinstance(given, (tuple, list, Mapping)):  # a container may hold itself
        for part in given.values() if isinstance(given, Mapping) else given:
            yield from tensors_of(part, levels - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCopy:
    """A copy of one tensor of a rank. `mesh` are the ranks of a DTensor, () for a plain tensor.

    Without blocks if it could not be read, or if no gradient reached it.
    """

    blocks: tuple[Block, ...] = ()
    mesh: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCalls:
    """Module path -> its calls in step 0. `outputs` is in the order in which modules first returned.

    An output is the first tensor of what a module returned, and `gradients` are the gradients of it. `inputs` are all
    tensors that a call received, `input_gradients` the gradients of the first of them. `plain` are the modules of
    torch.nn classes without hooks, which never communicate, `linear` those that own a parameter of several dims.
    """

    outputs: Mapping[str, tuple[TensorCopy, ...]]
    inputs: Mapping[str, tuple[tuple[TensorCopy, ...], ...]]
    gradients: Mapping[str, tuple[TensorCopy, ...]]
    input_gradients: Mapping[str, tuple[TensorCopy, ...]] = field(default_factory=dict)
    plain: frozenset[str] = frozenset()
    linear: frozenset[str] = frozenset()


class _Rank:
    """Captures of one rank so far, by module path; gradients by the number of the call."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[TensorCopy]] = {}
        self.inputs: dict[str, list[tuple[TensorCopy, ...]]] = {}
        self.gradients: dict[str, dict[int, Tensor | None]] = {}
        self.input_gradients: dict[str, dict[int, Tensor | None]] = {}
        self.hooked: dict[str, int] = {}
        self.plain: set[str] = set()
        self.linear: set[str] = set()


class CallCapture(ModuleWatch):
    """Copies what every named module receives and returns in step 0."""

    def __init__(self) -> None:
        super().__init__(self._output, self._input)
        self._captured: dict[int, _Rank] = {}

    def calls(self, rank: int) -> ModuleCalls:
        """Captures on this rank. They are read inside the rank, since the gradient of a DTensor must be."""
        mine = self._of(rank)

        def named(calls: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
            return ((path, of_module) for path, of_module in calls.items() if self.names_one(rank, path))

        def copies(slots: Mapping[str, Mapping[int, Tensor | None]]) -> dict[str, tuple[TensorCopy, ...]]:
            return {path: tuple(map(_copy_of, calls.values())) for path, calls in named(slots)}

        return ModuleCalls(
            outputs={path: tuple(calls) for path, calls in named(mine.outputs)},
            inputs={path: tuple(calls) for path, calls in named(mine.inputs)},
            gradients=copies(mine.gradients),
            input_gradients=copies(mine.input_gradients),
            plain=frozenset(mine.plain),
            linear=frozenset(mine.linear),
        )

    def _of(self, rank: int) -> _Rank:
        return self._captured.setdefault(rank, _Rank())

    def _input(self, lane: ThreadWatch, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        site, path = self.place(lane, module)
        if path and site.step == 0 and site.phase == "forward":
            rank, given = self._of(lane.rank), list(tensors_of((args, kwargs), levels=3))
            rank.inputs.setdefault(path, []).append(tuple(_copy_of(copy_tensor(tensor)) for tensor in given))
            slots = rank.input_gradients.setdefault(path, {})
            slots[len(slots)] = None
            if given and given[0].requires_grad:
                given[0].register_hook(make_keeping_hook(slots, len(slots) - 1))

    def _output(self, lane: ThreadWatch, module: nn.Module, output: Any) -> None:
        site, path = self.place(lane, module)
        tensor = next(tensors_of(output), None) if path and site.step == 0 else None
        if tensor is None:
            return
        rank = self._of(lane.rank)
        if site.phase == "forward":
            slots = rank.gradients.setdefault(path, {})
            rank.outputs.setdefault(path, []).append(_copy_of(copy_tensor(tensor)))
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
            rank.hooked[path] = number + 1  # if the first forward made no graph, this is the recomputed tensor
            tensor.register_hook(make_keeping_hook(slots, number))


def _copy_of(tensor: Tensor | None) -> TensorCopy:
    """The tensor as blocks; empty for anything but a tensor of numbers."""
    if tensor is None:
        return TensorCopy()
    try:
        with torch.no_grad():
            parts = blocks(tensor)
    except (ValueError, TypeError, RuntimeError):
        return TensorCopy()
    mesh = getattr(tensor, "device_mesh", None)
    return TensorCopy(blocks=parts, mesh=() if mesh is None else tuple(mesh.mesh.flatten().tolist()))
