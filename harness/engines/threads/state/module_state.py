"""The state that modules keep for a process, as places which every rank can have for itself.

The state of a named module is its globals and the attributes of its classes. Found from these in turn are the
attributes of instances (singletons) and of functions, and the defaults of arguments that can be changed. Lists, dicts,
sets and deques in them are copied for each rank, once where several names hold one. Caches of functools are new for
each rank. Everything else is shared: tensors, classes of other modules, instances of classes of Python's library or
torch. So are names that other modules imported from the named ones.
"""

import functools
import importlib
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import EnumMeta
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Protocol

from shardproof.harness.errors import RequestError, error_text

Names = dict[str, Any]
_CACHE: Any = type(functools.cache(len))
_COPIED = frozenset({dict, list, set, OrderedDict, defaultdict, deque})
_FOREIGN = frozenset(sys.stdlib_module_names) | {"numpy", "torch"}
"""Packages whose instances belong to the process: locks, loggers, groups, generators."""


class Namespace(Protocol):
    """Something that has names with values."""

    def read(self) -> Names:
        """The names and values that it has now."""

    def write(self, names: Names) -> None:
        """Make it have these and no others."""


class _Dict:
    """The globals of a module, or the attributes of an instance: the dict itself, which functions hold too."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def read(self) -> Names:
        """See Namespace."""
        return dict(self._names)

    def write(self, names: Names) -> None:
        """See Namespace. Never empty in between, since destructors may look into it."""
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
    """The places of these modules as they are now. Raises RequestError for one that cannot be imported."""
    modules = [_imported(name) for name in names]
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
            waiting += _methods(value, names)
            if _has_own_defaults(value, names):
                namespaces[id(value.__defaults__)] = _Defaults(value)
            if (place := _place(value, names)) is not None:
                namespaces.setdefault(id(value), place)
                waiting += place.read().values()
    return tuple(namespaces.values())


def own(places: Iterable[Namespace]) -> list[Names]:
    """For one rank: what the places have now, in containers of its own."""
    copies: dict[int, Any] = {}
    return [{name: _copied(value, copies) for name, value in place.read().items()} for place in places]


@contextmanager
def own_state(names: Sequence[str]) -> Iterator[None]:
    """Undo the body's changes in these modules. Raises RequestError as `namespaces_of`."""
    places = namespaces_of(names)
    before = [place.read() for place in places]
    for place, mine in zip(places, own(places), strict=True):
        place.write(mine)
    try:
        yield
    finally:
        for place, was in zip(places, before, strict=True):
            place.write(was)


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as problem:
        rule = "must be a module that can be imported; legal: megatron.core.parallel_state"
        raise RequestError(f"per_rank {name!r}: {rule} ({error_text(problem)})") from problem


def _place(value: Any, modules: Sequence[str]) -> Namespace | None:
    """The value as a place, None for one that is shared."""
    if isinstance(value, type):
        return _Class(value) if value.__module__ in modules and not isinstance(value, EnumMeta) else None
    if isinstance(value, FunctionType):
        return _Dict(vars(value)) if value.__module__ in modules and vars(value) else None
    package = str(type(value).__module__).partition(".")[0]
    if isinstance(value, ModuleType) or (package in _FOREIGN and not isinstance(value, SimpleNamespace)):
        return None
    attributes = getattr(value, "__dict__", None)
    return _Dict(attributes) if type(attributes) is dict else None


def _methods(value: Any, modules: Sequence[str]) -> list[FunctionType]:
    """The functions of a class of these modules."""
    parts = vars(value).values() if isinstance(value, type) and value.__module__ in modules else ()
    plain = [part.__wrapped__ if isinstance(part, staticmethod | classmethod) else part for part in parts]
    return [part for part in plain if isinstance(part, FunctionType)]


def _has_own_defaults(value: Any, modules: Sequence[str]) -> bool:
    """Whether it is a function of these modules with a default that can be changed."""
    own = isinstance(value, FunctionType) and value.__module__ in modules
    return own and any(type(default) in _COPIED for default in value.__defaults__ or ())


def _is_data(name: str, value: Any) -> bool:
    return not (name.startswith("__") and name.endswith("__")) and not hasattr(type(value), "__get__")


def _copied(value: Any, copies: dict[int, Any]) -> Any:
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
        made.update({key: _copied(item, copies) for key, item in value.items()})
    elif not isinstance(made, set):
        made.clear()
        made.extend([_copied(item, copies) for item in value])
    return made
