"""Every call of every module in step 0, captured from outside with its inputs and without any layout.

For whoever compares two programs module by module: `capture.calls(0).outputs["layers.0.mlp"][0].blocks`. A DTensor is
kept as the blocks that it declares, and the ranks of its mesh. Copies and hooks are those of `module_outputs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.harness.ledger import AGAIN
from shardproof.harness.outcome.blocks import Block, blocks
from shardproof.harness.recording.capturing.module_outputs import ModuleWatch, copied, keeping, tensors_of
from shardproof.harness.recording.module_watch import ThreadWatch
from shardproof.harness.torch_internals.autograd import has_hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCopy:
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
    """Copies what every named module is given and returns in step 0."""

    def __init__(self) -> None:
        super().__init__(self._output, self._input)
        self._captured: dict[int, _Rank] = {}

    def calls(self, rank: int) -> ModuleCalls:
        """Captures on this rank, to be read inside the rank: a DTensor's gradient is read here."""
        mine = self._of(rank)

        def copies(slots: Mapping[str, Mapping[int, Tensor | None]]) -> dict[str, tuple[TensorCopy, ...]]:
            return {path: tuple(map(_copy_of, calls.values())) for path, calls in slots.items()}

        return ModuleCalls(
            outputs={path: tuple(calls) for path, calls in mine.outputs.items()},
            inputs={path: tuple(calls) for path, calls in mine.inputs.items()},
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
            rank.inputs.setdefault(path, []).append(tuple(_copy_of(copied(tensor)) for tensor in given))
            slots = rank.input_gradients.setdefault(path, {})
            slots[len(slots)] = None
            if given and given[0].requires_grad:
                given[0].register_hook(keeping(slots, len(slots) - 1))

    def _output(self, lane: ThreadWatch, module: nn.Module, output: Any) -> None:
        site, path = self.place(lane, module)
        tensor = next(tensors_of(output), None) if path and site.step == 0 else None
        if tensor is None:
            return
        rank = self._of(lane.rank)
        if site.phase == "forward":
            slots = rank.gradients.setdefault(path, {})
            rank.outputs.setdefault(path, []).append(_copy_of(copied(tensor)))
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
            tensor.register_hook(keeping(slots, number))


def _copy_of(tensor: Tensor | None) -> TensorCopy:
    """The tensor as blocks; none of them for what is no tensor of numbers."""
    if tensor is None:
        return TensorCopy()
    try:
        with torch.no_grad():
            parts = blocks(tensor)
    except (ValueError, TypeError, RuntimeError):
        return TensorCopy()
    mesh = getattr(tensor, "device_mesh", None)
    return TensorCopy(blocks=parts, mesh=() if mesh is None else tuple(mesh.mesh.flatten().tolist()))
