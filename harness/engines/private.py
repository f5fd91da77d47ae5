"""Process-wide state that every rank of the in-process engine has to itself: swapped when the baton changes hands.

Random streams (torch's CPU generator, Python's `random`, numpy's global stream), the default dtype, and the globals of
modules that the caller lists. Swapping is sound only because one rank runs at a time. Not swapped, so shared by ranks:
the environment (RANK, WORLD_SIZE), the working folder, CUDA generators, class attributes, globals of unlisted modules.

Python's and numpy's streams are costly to read (8 and 36 us), and few programs draw from them between two collectives.
Both are Mersenne twisters: a draw moves the place in the words, and after the last word makes new words. These two
marks are compared with the start, and both streams are swapped in full only once they differ.
"""

from __future__ import annotations

import ctypes
import importlib
import random
import struct
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from harness.errors import RequestError

__all__ = ["Private", "modules_named"]

_WORDS = 624


class _Streams(NamedTuple):
    python: Any
    numpy: Any


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


class Private:
    """The private state of `world_size` ranks. `leave` and `enter` frame a hand-off, `restore` ends it all.

    Every rank starts from `seed`, the caller's default dtype, and the listed modules' globals as they are now; built-in
    lists, dicts and sets among these are copied for each rank.
    """

    def __init__(self, world_size: int, seed: int, modules: Sequence[ModuleType] = ()) -> None:
        self._seed = seed
        self._modules = tuple(modules)
        self._caller = (torch.default_generator.get_state(), _read_streams(), torch.get_default_dtype())
        self._caller_globals = [dict(vars(module)) for module in self._modules]
        self._torch = [torch.Generator().manual_seed(seed).get_state()] * world_size
        self._streams: list[_Streams | None] = [None] * world_size
        self._dtypes = [torch.get_default_dtype()] * world_size
        self._globals = [[_own(vars(module)) for module in self._modules] for _ in range(world_size)]
        self._holder = -1
        _seed_streams(seed)
        self._marks = _marks_reader()
        self._start = self._marks()
        self._mixed = False

    def enter(self, rank: int) -> None:
        """Make the process's state this rank's."""
        if self._holder == rank:
            return
        self._holder = rank
        torch.default_generator.set_state(self._torch[rank])
        if self._dtypes[rank] is not torch.get_default_dtype():
            torch.set_default_dtype(self._dtypes[rank])
        if self._mixed:
            streams = self._streams[rank]
            if streams is None:
                _seed_streams(self._seed)
            else:
                _write_streams(streams)
        if self._modules:
            for module, own in zip(self._modules, self._globals[rank], strict=True):
                _replace(vars(module), own)

    def leave(self, rank: int) -> None:
        """Keep the process's state as this rank's."""
        self._torch[rank] = torch.default_generator.get_state()
        self._dtypes[rank] = torch.get_default_dtype()
        if self._mixed or self._marks() != self._start:
            self._mixed = True
            self._streams[rank] = _read_streams()
        if self._modules:
            self._globals[rank] = [dict(vars(module)) for module in self._modules]

    def restore(self) -> None:
        """Make the process's state the caller's again."""
        torch_stream, streams, dtype = self._caller
        torch.default_generator.set_state(torch_stream)
        torch.set_default_dtype(dtype)
        _write_streams(streams)
        for module, own in zip(self._modules, self._caller_globals, strict=True):
            _replace(vars(module), own)


def _seed_streams(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _read_streams() -> _Streams:
    return _Streams(random.getstate(), np.random.get_state())


def _write_streams(streams: _Streams) -> None:
    random.setstate(streams.python)
    np.random.set_state(streams.numpy)


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


def _marks_reader() -> Callable[[], tuple[Any, ...]]:
    """A function that returns marks of both streams: the place in the current words, and the first word."""
    address = np.random.get_bit_generator().ctypes.state_address  # type: ignore[attr-defined]
    numpy_word = ctypes.c_uint32.from_address(address)
    numpy_place = ctypes.c_uint32.from_address(address + 4 * _WORDS)
    if not _PYTHON_TWISTER:
        return lambda: (random.getstate(), numpy_place.value, numpy_word.value)
    python_place = ctypes.c_uint32.from_address(_PYTHON_TWISTER)
    python_word = ctypes.c_uint32.from_address(_PYTHON_TWISTER + 4)
    return lambda: (python_place.value, python_word.value, numpy_place.value, numpy_word.value)


def _python_twister() -> int:
    """Where CPython keeps place and words of Python's global stream, after the object's head; 0 when not there."""
    owner = random.random.__self__  # type: ignore[attr-defined]
    size = 4 * (1 + _WORDS)
    if type(owner).__basicsize__ < object.__basicsize__ + size:
        return 0
    address = id(owner) + object.__basicsize__
    place, *words = struct.unpack(f"=i{_WORDS}I", ctypes.string_at(address, size))
    return address if (*words, place) == random.getstate()[1] else 0


_PYTHON_TWISTER = _python_twister()
