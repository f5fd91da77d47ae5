"""Activations and their gradients, captured from outside: what every module returned, and what flowed back into it.

A gradient is taken by a hook on the tensor, which adds no node to the graph and hands nothing on, so that results stay
the same bits. Captured are copies on the rank's device. Under reentrant checkpointing, where the first forward makes no
graph, the gradient is that of the recomputed tensor.

    with Capture() as capture:
        ...  # in the thread of each rank: with capture.on_rank(rank): program(rank)
    capture.outputs(0)["layers.0.mlp"], capture.gradients(0)["layers.0.mlp"]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from harness.ledger import AGAIN
from harness.recording.attribution import Attribution
from harness.recording.observations import read
from harness.recording.watch import Emit, ThreadWatch, Watch

__all__ = ["Capture", "first_tensor"]


class _Captured:
    """What one rank has given so far, by module path."""

    def __init__(self) -> None:
        self.attribution = Attribution()
        self.outputs: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.hooked: set[str] = set()


class Capture:
    """Copies the output of every named module, of the micro-batches that `wanted(step, microbatch)` chooses.

    The default is the first micro-batch of the first step. Of several calls of one module the first counts, of an
    output of several tensors the first tensor; gradients of several backwards add up. The model itself, whose path is
    "", is left out.
    """

    def __init__(self, wanted: Callable[[int, int], bool] | None = None) -> None:
        self._wanted = wanted or _first
        self._ranks: dict[int, _Captured] = {}
        self._watch = Watch(self._emit, self._output)

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

    def outputs(self, rank: int) -> dict[str, Tensor]:
        """Module path -> what the module returned on this rank, detached; empty for a rank that called none."""
        return dict(self._of(rank).outputs)

    def gradients(self, rank: int) -> dict[str, Tensor]:
        """Module path -> the gradient of that output; modules without one are left out."""
        return dict(self._of(rank).gradients)

    def _of(self, rank: int) -> _Captured:
        return self._ranks.setdefault(rank, _Captured())

    def _emit(self, rank: int) -> Emit:
        feed = self._of(rank).attribution.feed
        return lambda plain: feed(read(plain))

    def _output(self, lane: ThreadWatch, module: nn.Module, output: Any) -> None:
        captured = self._of(lane.rank)
        site = captured.attribution.current(lane.number)
        path = captured.attribution.paths.module(module, "")
        tensor = first_tensor(output) if path and self._wanted(site.step, site.microbatch) else None
        if tensor is None:
            return
        if site.phase == "forward" and path not in captured.outputs:
            captured.outputs[path] = _copy(tensor)
        elif path in captured.hooked or site.phase != AGAIN:
            return
        if tensor.requires_grad:
            captured.hooked.add(path)
            tensor.register_hook(_keeping(captured.gradients, path))


def _first(step: int, microbatch: int) -> bool:
    return step == 0 and microbatch == 0


def _keeping(gradients: dict[str, Tensor], path: str) -> Callable[[Tensor], None]:
    """The hook that keeps a copy of the gradient it sees and returns nothing, so that it changes nothing."""

    def keep(gradient: Tensor) -> None:
        copy = _copy(gradient)
        gradients[path] = gradients[path] + copy if path in gradients else copy

    return keep


def _copy(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.detach().clone()


def first_tensor(output: Any) -> Tensor | None:
    """The first tensor of an output: itself, or the first in a tuple, list or mapping."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return next((found for part in output if (found := first_tensor(part)) is not None), None)
    return None
