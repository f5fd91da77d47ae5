"""Records the outputs of a program's modules by forward hooks, and the gradients of these outputs by tensor hooks.

A module that is called in backward recomputes what activation checkpointing dropped. Where the first call made no graph
(reentrant checkpointing), gradients of its outputs are taken from the second. A tensor hook keeps the row of a gradient
and no tensor, so it keeps no graph alive.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.harness.programs.tensors.layouts import tensors_in
from shardproof.harness.programs.tensors.names import ModulePath, Names
from shardproof.harness.programs.tensors.store import StepValues
from shardproof.harness.programs.values import ValueRow
from shardproof.harness.torch_internals.autograd import version_of


@dataclass(slots=True)
class _Seen:
    """A recorded tensor: its version then, its keys in the store, and the rows that wait for its gradient."""

    tensor: Any
    version: int
    keys: tuple[str, ...]
    waiting: list[ValueRow]


@dataclass(slots=True, kw_only=True)
class _Later:
    """An output without a graph, whose gradient comes when its module is called again."""

    microbatch: int
    call: int
    leaf: str
    waiting: list[ValueRow]


@dataclass(slots=True, kw_only=True)
class ModuleValues:
    """Records into `store`. `drawn` are the modules that drew random numbers.

    `guard` calls a function of ours so that what it raises never reaches the program.
    """

    store: StepValues
    names: Names
    guard: Any
    drawn: dict[str, None] = field(default_factory=dict)
    _microbatch: int = -1
    _calls: Counter[int] = field(default_factory=Counter)
    _again: Counter[int] = field(default_factory=Counter)
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _later: dict[int, list[_Later]] = field(default_factory=dict)
    _on_leaves: list[Any] = field(default_factory=list)
    _random: Sequence[tuple[int, object]] = ()

    def begin_step(self) -> None:
        """A step begins."""
        self._microbatch = -1
        for handle in self._on_leaves:
            handle.remove()
        for kept in (self._calls, self._again, self._seen, self._later, self._on_leaves):
            kept.clear()

    def enter(self, root: nn.Module, prefix: str, args: tuple[Any, ...], words: dict[str, Any]) -> None:
        """Record the arguments of an outermost module, the samples."""
        self._microbatch += 1
        self._random = _random_states()
        call = self._again[id(root)]
        self._again[id(root)] += 1
        for leaf, tensor in tensors_in({"args": args, **words}):
            place = ModulePath(f"{prefix}:{leaf}" if prefix else leaf, "")
            self.store.add(self.store.make_row("sample", place, call=call), tensor)

    def look_for_draws(self, module: nn.Module) -> None:
        """Note `module` as one that draws random numbers if a generator has advanced since the last call of this.

        A generator whose seed is another one has not advanced: the program has put another stream in its place.
        """
        before, self._random = self._random, _random_states()
        advanced = any(a != b and a[0] == b[0] for a, b in zip(before, self._random, strict=False))
        if advanced and (place := self.names.modules.get(id(module))) is not None:
            self.drawn[place.name] = None

    def leave(self, module: nn.Module, output: object) -> None:
        """Record what a module returned in forward."""
        place = self.names.modules.get(id(module))
        if place is None:
            return
        self.look_for_draws(module)
        call = self._calls[id(module)]
        self._calls[id(module)] += 1
        for leaf, tensor in tensors_in(output):
            if not tensor.is_meta:
                row = self.store.make_row("output", place, call=call, leaf=leaf)
                waiting = self._take_output(row, tensor)
                if not tensor.requires_grad and not torch.is_grad_enabled():
                    later = _Later(microbatch=self._microbatch, call=call, leaf=leaf, waiting=waiting)
                    self._later.setdefault(id(module), []).append(later)

    def leave_again(self, module: nn.Module, output: object) -> None:
        """Take the gradients of a recomputed output for the rows of the output in forward, if that had no graph."""
        for leaf, tensor in tensors_in(output):
            if tensor.requires_grad and (found := self._find_later(id(module), leaf)) is not None:
                self._await_gradient(tensor, found.waiting)

    def _find_later(self, module: int, leaf: str) -> _Later | None:
        """The waiting output of the oldest micro-batch, None if the module was called several times in that.

        Several calls of one micro-batch may be recomputed in any order, so they cannot be told apart.
        """
        waiting = [later for later in self._later.get(module, ()) if later.leaf == leaf]
        oldest = [later for later in waiting if later.microbatch == waiting[0].microbatch]
        for later in oldest:
            self._later[module].remove(later)
        return oldest[0] if len(oldest) == 1 else None

    def _take_output(self, row: ValueRow, tensor: Tensor) -> list[ValueRow]:
        """Record an output. Returns the rows that wait for its gradient."""
        seen, wanted = self._seen.get(id(tensor)), replace(row, kind="output_grad")
        if seen is not None and seen.tensor() is tensor and seen.version == version_of(tensor):
            self.store.repeat(row, seen.keys)
            if id(tensor) not in self.names.parameters:
                seen.waiting.append(wanted)
            return seen.waiting
        keys = self.store.add(row, tensor)
        waiting = [] if id(tensor) in self.names.parameters else [wanted]  # a parameter has a gradient of its own
        self._seen[id(tensor)] = _Seen(weakref.ref(tensor), version_of(tensor), keys, waiting)
        if tensor.requires_grad and waiting:
            self._await_gradient(tensor, waiting)
        return waiting

    def _await_gradient(self, tensor: Tensor, waiting: list[ValueRow]) -> None:
        handle = tensor.register_hook(partial(self._on_gradient, waiting))
        if tensor.is_leaf:
            self._on_leaves.append(handle)

    def _on_gradient(self, waiting: list[ValueRow], gradient: Tensor) -> None:
        self.guard(self._take_gradient, waiting, gradient)

    def _take_gradient(self, waiting: list[ValueRow], gradient: Tensor) -> None:
        rows = [row for row in waiting if row.step == self.store.step]
        waiting.clear()  # with retain_graph=True a second backward calls the hook again
        if rows and gradient is not None:
            keys = self.store.add(rows[0], gradient)
            for row in rows[1:]:
                self.store.repeat(row, keys)


def _random_states() -> list[tuple[int, object]]:
    """Of each of torch's own generators its seed, and something that changes when a random number is drawn."""
    found: list[tuple[int, object]] = []
    cpu = torch.default_generator
    found.append((cpu.initial_seed(), cpu.get_state().numpy().tobytes()))
    if torch.cuda.is_initialized():
        gpu = torch.cuda.default_generators[torch.cuda.current_device()]
        if gpu.device.type == "cuda":
            found.append((gpu.initial_seed(), gpu.get_offset()))  # no wait for the GPU
    return found
