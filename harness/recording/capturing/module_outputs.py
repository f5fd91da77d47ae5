"""Activations and their gradients, captured from outside: what modules returned, and what flowed back.

A gradient is taken by a hook on the tensor, which adds no node to the graph and hands nothing on. So results stay the
same bits. Captured are copies on the rank's device. Under reentrant checkpointing, where the first forward makes no
graph, the gradient is that of the recomputed tensor. The model itself, whose path is "", is left out.

    with Capture() as capture:
        ...  # in the thread of each rank: with capture.on_rank(rank): program(rank)
    capture.outputs(0)["layers.0.mlp"], capture.gradients(0)["layers.0.mlp"]
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.harness.ledger import AGAIN
from shardproof.harness.recording.attribution import Attribution
from shardproof.harness.recording.lanes import Site
from shardproof.harness.recording.module_watch import Emit, OnInput, OnOutput, ThreadWatch
from shardproof.harness.recording.observations import read
from shardproof.harness.recording.watch import Watch


class ModuleWatch(Watch):
    """Hears of every call of a module on every rank, and knows where it belongs."""

    def __init__(self, on_output: OnOutput, on_input: OnInput | None = None) -> None:
        super().__init__(self._feed, on_output, on_input=on_input)
        self._attributions: dict[int, Attribution] = {}

    def place(self, lane: ThreadWatch, module: nn.Module) -> tuple[Site, str]:
        """Where a call of a module belongs, and the module's path."""
        attribution = self._attributions[lane.rank]
        return attribution.current(lane.number), attribution.paths.module(module, "")

    def _feed(self, rank: int) -> Emit:
        feed = self._attributions.setdefault(rank, Attribution()).feed
        return lambda plain: feed(read(plain))


class _Captured:
    """Captures of one rank so far, by module path."""

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor | None] = {}


class Capture(ModuleWatch):
    """Copies the output of every named module, of the micro-batches that `wanted(step, microbatch)` chooses.

    The default is the first micro-batch of the first step. Of several calls of one module the first counts, of an
    output of several tensors the first tensor; gradients of several backwards add up.
    """

    def __init__(self, wanted: Callable[[int, int], bool] = lambda step, microbatch: step == microbatch == 0) -> None:
        super().__init__(self._output)
        self._wanted = wanted
        self._captured: dict[int, _Captured] = {}

    def outputs(self, rank: int) -> dict[str, Tensor]:
        """Module path -> what the module returned on this rank, detached; empty for a rank that called none."""
        return dict(self._of(rank).outputs)

    def gradients(self, rank: int) -> dict[str, Tensor]:
        """Module path -> the gradient of that output; modules without one are left out."""
        return {path: gradient for path, gradient in self._of(rank).gradients.items() if gradient is not None}

    def _of(self, rank: int) -> _Captured:
        return self._captured.setdefault(rank, _Captured())

    def _output(self, lane: ThreadWatch, module: nn.Module, output: Any) -> None:
        site, path = self.place(lane, module)
        tensor = next(tensors_of(output), None) if path and self._wanted(site.step, site.microbatch) else None
        if tensor is None:
            return
        captured = self._of(lane.rank)
        if site.phase == "forward" and path not in captured.outputs:
            captured.outputs[path] = copied(tensor)
        elif path in captured.gradients or site.phase != AGAIN:
            return
        if tensor.requires_grad:
            captured.gradients[path] = None
            tensor.register_hook(keeping(captured.gradients, path))


def keeping(slots: dict[Any, Tensor | None], key: object) -> Callable[[Tensor], None]:
    """The hook that adds a copy of the gradient it sees to a slot and returns nothing, so that it changes nothing."""

    def keep(gradient: Tensor) -> None:
        before, copy = slots[key], copied(gradient)
        slots[key] = copy if before is None else before + copy

    return keep


def copied(tensor: Tensor) -> Tensor:
    """A copy without a graph."""
    with torch.no_grad():
        return tensor.detach().clone()


def tensors_of(given: object, levels: int = 16) -> Iterator[Tensor]:
    """The tensors among arguments or results: themselves, or in tuples, lists and mappings, down to these levels."""
    if isinstance(given, Tensor):
        yield given
    elif levels and isinstance(given, (tuple, list, Mapping)):  # one may hold itself
        for part in given.values() if isinstance(given, Mapping) else given:
            yield from tensors_of(part, levels - 1)
