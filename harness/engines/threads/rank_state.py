"""Process-wide state that every rank of the in-process engine has to itself: swapped at every change of turns.

It is the random streams (torch's CPU generator, Python's `random`, numpy's global one), the default dtype, and the
state of modules that the request names. Swapping is sound only because one rank runs at a time. Not swapped, so shared
by ranks: the working folder, CUDA generators, the state of other modules. The environment is looked up by thread.

The state of a named module is its globals and the attributes of its classes. From these the attributes of instances
(singletons) and of functions are found in turn, and defaults of arguments that can be changed. Lists, dicts, sets and
deques in them are copied for each rank, but only once if several names have the same one. Caches of functools are new
for each rank. Everything else is shared: tensors, classes of other modules, instances of classes of torch or of
Python's library, and names that other modules imported from the named ones.
"""

import ctypes
import functools
import importlib
import random
import struct
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import EnumMeta
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from shardproof.harness.errors import RequestError, error_text
from shardproof.harness.torch_internals.autograd import generator_address

_WORDS = 624
_BYTES = 4 * (1 + _WORDS)
_HAS_GAUSS = 3
"""The index in numpy's legacy state of the flag that a second normal number is kept for the next draw."""


class _Stream(NamedTuple):
    """A stream of the process. `mark()` is equal as long as no code draws or seeds."""

    seed: Callable[[int], object]
    read: Callable[[], Any]
    write: Callable[[Any], object]
    mark: Callable[[], Any]


class RankStreams:
    """The streams of all ranks of a run. Making this seeds the process's streams. `clean`: no code has drawn yet.

    To read and write them costs 1 us (torch) to 36 us (numpy) and sweeps the caches, and few programs draw between two
    collectives. All three are Mersenne twisters in memory: a draw moves the place in the words, and after the last word
    new words are made. So the place and the first word, the mark of a stream, show whether anything was drawn. A stream
    is swapped only from the first change of turns at which its mark is not that of the start. If a twister is not found
    in memory, its mark is its whole state.
    """

    def __init__(self, world_size: int, seed: int) -> None:
        self._seed = seed
        self._states: list[list[Any]] = [[None] * world_size for _ in _STREAMS]
        self._mixed = [False] * len(_STREAMS)
        self.clean = True
        for stream in _STREAMS:
            stream.seed(seed)
        self._start = _TORCH_MARK(), _PYTHON_MARK(), _NUMPY_MARK()

    def enter(self, rank: int) -> None:
        """Make the process's streams this rank's; not needed while they are `clean`."""
        for stream, states, mixed in zip(_STREAMS, self._states, self._mixed, strict=True):
            if mixed and states[rank] is None:
                stream.seed(self._seed)
            elif mixed:
                stream.write(states[rank])

    def numpy_drawn(self) -> bool:
        """Whether any code has drawn from numpy's stream since it was seeded."""
        return self._mixed[-1] or _NUMPY_MARK() != self._start[-1]

    def leave(self, rank: int) -> None:
        """Keep the process's streams as this rank's."""
        marks = _TORCH_MARK(), _PYTHON_MARK(), _NUMPY_MARK()
        if self.clean and marks == self._start:
            return
        self.clean = False
        for i, stream in enumerate(_STREAMS):
            self._mixed[i] = self._mixed[i] or marks[i] != self._start[i]
            if self._mixed[i]:
                self._states[i][rank] = stream.read()


class CallerStreams:
    """The caller's streams. While numpy's words in memory stay the same, its state is not read again."""

    def __init__(self) -> None:
        self._words = b""
        self._torch, self._python, self._numpy = (stream.read() for stream in _STREAMS)

    def keep(self) -> None:
        """Read the streams."""
        words = ctypes.string_at(_NUMPY, _BYTES)
        self._torch, self._python = torch.default_generator.get_state(), random.getstate()
        if words != self._words or self._numpy[_HAS_GAUSS]:
            self._words, self._numpy = words, np.random.get_state()

    def give_back(self, streams: RankStreams) -> None:
        """Write the streams; of numpy's only the words, if no code has drawn from it and no normal number was kept."""
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        if streams.numpy_drawn() or self._numpy[_HAS_GAUSS]:
            np.random.set_state(self._numpy)
        else:
            ctypes.memmove(_NUMPY, self._words, _BYTES)


@functools.lru_cache(maxsize=4)
def _seeded_state(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def _make_reader(address: int, words: int, step: int = 1) -> Callable[[], bytes]:
    """A function that reads every `step`-th of some 32-bit words in the memory of this process."""
    return memoryview((ctypes.c_uint32 * words).from_address(address))[::step].tobytes


def _torch_mark() -> Callable[[], Any]:
    """The mark of torch's CPU generator: words left, place and first word, which follow the seed in the C++ object."""
    probe: Any = torch.Generator()
    generator: Any = torch.default_generator
    seed = 0x1234567890ABCDEF
    place = generator_address(probe.manual_seed(seed))
    head = b"" if place is None else ctypes.string_at(place, 512)
    offset = head.find(seed.to_bytes(8, sys.byteorder))  # 512 bytes is less than the words alone take
    if offset < 0 or struct.unpack_from("=i?3xII", head, offset + 8) != (1, True, 0, seed % 2**32):
        return lambda: generator.get_state().numpy().tobytes()
    address = (generator_address(generator) or 0) + offset
    return _make_reader(address + 8, 4)


def _python_mark() -> Callable[[], Any]:
    """The mark of Python's global stream: place and first word, which CPython keeps after the object's head."""
    owner = random.random.__self__  # type: ignore[attr-defined]
    address = id(owner) + object.__basicsize__
    if type(owner).__basicsize__ >= object.__basicsize__ + _BYTES:
        place, *words = struct.unpack(f"=i{_WORDS}I", ctypes.string_at(address, _BYTES))
        if (*words, place) == random.getstate()[1]:
            return _make_reader(address, 2)
    return random.getstate


_NUMPY: int = np.random.get_bit_generator().ctypes.state_address  # type: ignore[attr-defined]
"""Where numpy's global twister keeps its words, and after them the place."""
_TORCH_MARK, _PYTHON_MARK, _NUMPY_MARK = _torch_mark(), _python_mark(), _make_reader(_NUMPY, 1 + _WORDS, _WORDS)
_GENERATOR = torch.default_generator
_STREAMS = (
    _Stream(
        lambda seed: _GENERATOR.set_state(_seeded_state(seed)), _GENERATOR.get_state, _GENERATOR.set_state, _TORCH_MARK
    ),
    _Stream(random.seed, random.getstate, random.setstate, _PYTHON_MARK),
    _Stream(lambda seed: np.random.seed(seed % 2**32), np.random.get_state, np.random.set_state, _NUMPY_MARK),
)


class PerRankState:
    """The private state of `world_size` ranks. `leave` and `enter` frame a change of turns; `restore` ends the run.

    Every rank starts from `seed`, the caller's default dtype, and the present values of the places.
    """

    def __init__(self, world_size: int, seed: int, places: "Sequence[Namespace]", caller: CallerStreams) -> None:
        self._places = tuple(places)
        self._caller = caller
        self._callers_dtype = torch.get_default_dtype()
        self._callers_names = [place.read() for place in self._places]
        caller.keep()
        self._streams = RankStreams(world_size, seed)
        self._dtypes = [torch.get_default_dtype()] * world_size
        self._names: list[list[dict[str, Any]]] = [[] for _ in range(world_size)]
        if self._places:
            self._names = [copy_places(self._places) for _ in range(world_size)]
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
        if self._places:
            for place, mine in zip(self._places, self._names[rank], strict=True):
                place.write(mine)

    def leave(self, rank: int) -> None:
        """Keep the process's state as this rank's."""
        self._dtypes[rank] = torch.get_default_dtype()
        self._streams.leave(rank)
        if self._places:
            self._names[rank] = [place.read() for place in self._places]

    def end(self, rank: int) -> None:
        """The rank has finished: only whether it has drawn still matters."""
        self._streams.leave(rank)

    @property
    def drew(self) -> bool:
        """Whether any rank drew from a random stream of the process, or seeded one."""
        return not self._streams.clean

    def restore(self) -> None:
        """Make the process's state the caller's again."""
        if self._callers_dtype is not torch.get_default_dtype():
            torch.set_default_dtype(self._callers_dtype)
        self._caller.give_back(self._streams)
        for place, was in zip(self._places, self._callers_names, strict=True):
            place.write(was)


Names = dict[str, Any]
_CACHE: Any = type(functools.cache(len))
_COPIED = frozenset({dict, list, set, OrderedDict, defaultdict, deque})
_FOREIGN = frozenset(sys.stdlib_module_names) | {"numpy", "torch"}
"""Packages whose instances belong to the process: locks, loggers, groups, generators."""


class Namespace(Protocol):
    """Something with names that have values."""

    def read(self) -> Names:
        """The names and values that it has now."""

    def write(self, names: Names) -> None:
        """Make it have these and no others."""


class _Dict:
    """The globals of a module, or the attributes of an instance: the dict itself, which functions refer to as well."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def read(self) -> Names:
        """See Namespace."""
        return dict(self._names)

    def write(self, names: Names) -> None:
        """See Namespace. It is never empty meanwhile, since destructors may read it."""
        self._names.update(names)
        if len(self._names) != len(names):
            for name in self._names.keys() - names.keys():
                del self._names[name]


class _Class:
    """The attributes of a class that are neither methods nor Python's own."""

    def __init__(self, owner: type) -> None:
        self._owner = owner

    def read(self) -> Names:
        """See Namespace."""
        return {name: value for name, value in vars(self._owner).items() if _is_data(name, value)}

    def write(self, names: Names) -> None:
        """See Namespace."""
        now = self.read()
        for name, value in names.items():
            if name not in now or now[name] is not value:
                type.__setattr__(self._owner, name, value)
        for name in now.keys() - names.keys():
            type.__delattr__(self._owner, name)


class _Defaults:
    """The defaults of a function's arguments, in which a call can leave something for the next."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function

    def read(self) -> Names:
        """See Namespace."""
        return {str(place): value for place, value in enumerate(self._function.__defaults__ or ())}

    def write(self, names: Names) -> None:
        """See Namespace."""
        self._function.__defaults__ = tuple(names.values())


def namespaces_of(names: Sequence[str]) -> tuple[Namespace, ...]:
    """The places where these modules now have state. Raises RequestError for a module that cannot be imported."""
    modules = [_import_optional(name) for name in names]
    namespaces: dict[int, Namespace] = {id(vars(module)): _Dict(vars(module)) for module in modules}
    seen: dict[int, Any] = {}
    waiting = [value for module in modules for value in vars(module).values()]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, list | tuple | set | frozenset | deque):
            waiting += value
        elif isinstance(value, Mapping):
            waiting += value.values()
        else:
            waiting += _methods_of_class(value, names)
            if _has_own_defaults(value, names):
                namespaces[id(value.__defaults__)] = _Defaults(value)
            if (place := _as_place(value, names)) is not None:
                namespaces.setdefault(id(value), place)
                waiting += place.read().values()
    return tuple(namespaces.values())


def copy_places(places: Iterable[Namespace]) -> list[Names]:
    """For one rank: the current content of the places, with containers of its own."""
    copies: dict[int, Any] = {}
    return [{name: _copy_containers(value, copies) for name, value in place.read().items()} for place in places]


@contextmanager
def own_state(names: Sequence[str]) -> Iterator[None]:
    """Undo the body's changes in these modules. Raises RequestError as `namespaces_of` does."""
    places = namespaces_of(names)
    before = [place.read() for place in places]
    for place, mine in zip(places, copy_places(places), strict=True):
        place.write(mine)
    try:
        yield
    finally:
        for place, was in zip(places, before, strict=True):
            place.write(was)


def _import_optional(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as problem:
        rule = "must be a module that can be imported; legal: megatron.core.parallel_state"
        raise RequestError(f"per_rank {name!r}: {rule} ({error_text(problem)})") from problem


def _as_place(value: Any, modules: Sequence[str]) -> Namespace | None:
    """The value as a place; None for one that is shared."""
    if isinstance(value, type):
        return _Class(value) if value.__module__ in modules and not isinstance(value, EnumMeta) else None
    if isinstance(value, FunctionType):
        return _Dict(vars(value)) if value.__module__ in modules and vars(value) else None
    package = str(type(value).__module__).partition(".")[0]
    if isinstance(value, ModuleType) or (package in _FOREIGN and not isinstance(value, SimpleNamespace)):
        return None
    attributes = getattr(value, "__dict__", None)
    return _Dict(attributes) if type(attributes) is dict else None


def _methods_of_class(value: Any, modules: Sequence[str]) -> list[FunctionType]:
    """The functions of a class of these modules."""
    parts = vars(value).values() if isinstance(value, type) and value.__module__ in modules else ()
    plain = [part.__wrapped__ if isinstance(part, staticmethod | classmethod) else part for part in parts]
    return [part for part in plain if isinstance(part, FunctionType)]


def _has_own_defaults(value: Any, modules: Sequence[str]) -> bool:
    """Whether a value is a function of these modules with a default that can be changed."""
    own = isinstance(value, FunctionType) and value.__module__ in modules
    return own and any(type(default) in _COPIED for default in value.__defaults__ or ())


def _is_data(name: str, value: Any) -> bool:
    return not (name.startswith("__") and name.endswith("__")) and not hasattr(type(value), "__get__")


def _copy_containers(value: Any, copies: dict[int, Any]) -> Any:
    """A container with its containers copied, a cache emptied; everything else itself."""
    made, kind = copies.get(id(value)), type(value)
    if made is not None:
        return made
    if kind is _CACHE:
        copies[id(value)] = functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
        return copies[id(value)]
    if kind not in _COPIED:
        return value
    made = copies[id(value)] = value.copy()
    if isinstance(made, dict):
        made.update({key: _copy_containers(item, copies) for key, item in value.items()})
    elif not isinstance(made, set):
        made.clear()
        made.extend([_copy_containers(item, copies) for item in value])
    return made
