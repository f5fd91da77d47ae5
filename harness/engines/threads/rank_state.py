"""Process-wide state that every rank of the in-process engine has to itself: swapped at every change of turns.

Random streams (torch's CPU generator, Python's `random`, numpy's global stream), the default dtype, and the globals of
modules that the caller lists. Swapping is sound only because one rank runs at a time. Not swapped, so shared by ranks:
the environment (RANK, WORLD_SIZE), the working folder, CUDA generators, class attributes, globals of unlisted modules.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from harness.engines.threads.rng_streams import CallerStreams, RankStreams
from harness.errors import RequestError

__all__ = ["PerRankState", "modules_named"]


def modules_named(names: Sequence[str]) -> tuple[ModuleType, ...]:
    """The modules whose globals each rank has to itself. Raises RequestError for one that cannot be imported."""
    modules = []
    for name in names:
        try:
            modules.append(importlib.import_module(name))
        except ImportError as problem:
            rule = "must be a module that can be imported; legal: megatron.core.parallel_state"
            raise RequestError(f"per_rank_modules {name!r}: {rule} ({problem})") from problem
    return tuple(modules)


class PerRankState:
    """The private state of `world_size` ranks. `leave` and `enter` frame a change of turns; `restore` ends the run.

    Every rank starts from `seed`, the caller's default dtype, and the listed modules' globals as they are now; built-in
    lists, dicts and sets among these are copied for each rank.
    """

    def __init__(self, world_size: int, seed: int, modules: Sequence[ModuleType], caller: CallerStreams) -> None:
        self._modules = tuple(modules)
        self._caller = caller
        self._callers_dtype = torch.get_default_dtype()
        self._callers_globals = [dict(vars(module)) for module in self._modules]
        caller.keep()
        self._streams = RankStreams(world_size, seed)
        self._dtypes = [torch.get_default_dtype()] * world_size
        self._globals = [[_own(vars(module)) for module in self._modules] for _ in range(world_size)]
        self._holder = -1

    def enter(self, rank: int) -> None:
        """Make the process's state this rank's."""
        if self._holder == rank:
            return
        self._holder = rank
        if self._dtypes[rank] is not torch.get_default_dtype():
            torch.set_default_dtype(self._dtypes[rank])
        if not self._streams.clean:
            self._streams.enter(rank)
        if self._modules:
            for module, own in zip(self._modules, self._globals[rank], strict=True):
                _replace(vars(module), own)

    def leave(self, rank: int) -> None:
        """Keep the process's state as this rank's."""
        self._dtypes[rank] = torch.get_default_dtype()
        self._streams.leave(rank)
        if self._modules:
            self._globals[rank] = [dict(vars(module)) for module in self._modules]

    def end(self, rank: int) -> None:
        """The rank has finished: only whether it has drawn still matters."""
        self._streams.leave(rank)

    def restore(self) -> None:
        """Make the process's state the caller's again."""
        if self._callers_dtype is not torch.get_default_dtype():
            torch.set_default_dtype(self._callers_dtype)
        self._caller.give_back(self._streams)
        for module, own in zip(self._modules, self._callers_globals, strict=True):
            _replace(vars(module), own)


def _own(module_globals: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) for name, value in module_globals.items()}


def _copied(value: Any) -> Any:
    """A built-in container with its built-in containers copied; everything else is shared."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) is list:
        return [_copied(item) for item in value]
    return set(value) if type(value) is set else value


def _replace(module_globals: dict[str, Any], own: dict[str, Any]) -> None:
    """In place, since functions hold the dict itself; never empty in between, since destructors may look into it."""
    module_globals.update(own)
    if len(module_globals) != len(own):
        for name in module_globals.keys() - own.keys():
            del module_globals[name]
