"""Keeps the folders behind `shardproof` and other packages of the same names apart, in one process.

Import names of ours are the folder names (`reports`, `parallel` ...), and these are generic. A user's working directory
may well have a package `parallel`, or a folder `bench`. After `lead`, modules of ours import ours, wherever another
lies; every other module imports what it would without shardproof. The other package then stands in `sys.modules` below
`beside_shardproof`, since the name itself is taken. Without such a package nothing of Python's own import is replaced.

Source: importlib's documentation, "Finders and loaders"; `builtins.__import__` is what the statement `import` calls.
"""

import builtins
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

ROOMS = ("reference", "parallel", "harness", "reports", "suites", "bench", "bugs")
HOME = Path(__file__).resolve().parents[1]
"""The folder in which `shardproof` and the folders behind it lie side by side."""
_OURS = tuple(f"{HOME}{os.sep}{room}{os.sep}" for room in (*ROOMS, "shardproof"))
_BESIDE = "beside_shardproof"


class ShadowedError(ImportError):
    """Another package has been imported under the name of one of ours; the message names both folders."""


def lead(*rooms: str) -> None:
    """Have these rooms (default: all) found in HOME, before any package of the same name; a second time adds rooms.

    Raises ShadowedError for one whose name another package has in `sys.modules` already.
    """
    for room in rooms or ROOMS:
        if room in sys.modules and (found := foreign(room)):
            legal = "rename that one, or import it after shardproof (a recorded program: after torch.distributed)"
            raise ShadowedError(
                f"package {room}: {found} has been imported, and shardproof needs {HOME / room}; legal: {legal}",
                name=room,
            )
    finder = next((one for one in sys.meta_path if isinstance(one, _Leading)), None)
    if finder is None:
        finder = _Leading()
        sys.meta_path.insert(0, finder)
    finder.add(rooms or ROOMS)


def foreign(room: str) -> str:
    """The place of the package that Python imports under this name, "" when it is ours or when there is none."""
    module = sys.modules.get(room)
    spec = importlib.util.find_spec(room) if module is None else module.__spec__
    return "" if spec is None or _is_ours(spec) else _places(spec)[0]


def _places(spec: ModuleSpec) -> list[str]:
    return list(spec.submodule_search_locations or [str(spec.origin)])


def _is_ours(spec: ModuleSpec) -> bool:
    return any(Path(place).resolve().parent == HOME for place in _places(spec))


class _Leading:
    """The finder before all others. `beside`: the packages of others that have the names of rooms."""

    def __init__(self) -> None:
        self.beside: dict[str, ModuleSpec] = {}
        self._rooms: set[str] = set()
        self._path: list[str] = []

    def add(self, rooms: Sequence[str]) -> None:
        """Find these rooms too."""
        self._rooms |= {*rooms}
        self._look()

    def find_spec(self, name: str, path: Any = None, _target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a room; None for all else. Raises ModuleNotFoundError for a module of another's that was not
        imported by a statement.
        """
        if sys.path != self._path:
            self._look()
        room, _, rest = name.partition(".")
        if room not in self._rooms:
            return None
        if not rest:
            return PathFinder.find_spec(name, [str(HOME)])
        if room in self.beside and PathFinder.find_spec(name, path) is None:
            where = f"{HOME / room}, and {_places(self.beside[room])[0]} stands beside it"
            legal = "the statement `import` in place of a function, or another name for that package"
            raise ModuleNotFoundError(f"no module {name!r} in {where}; legal: {legal}", name=name)
        return None

    def _look(self) -> None:
        """Find out what is beside our rooms, since where Python looks has changed."""
        self._path = list(sys.path)
        others = [place for place in sys.path if Path(place or ".").resolve() != HOME]
        found = {room: _found(room, others) for room in sorted(self._rooms)}
        self.beside = {room: spec for room, spec in found.items() if spec is not None}
        if not self.beside:
            return
        package = sys.modules.setdefault(_BESIDE, ModuleType(_BESIDE, "Packages with the names of shardproof's."))
        parents = [str(Path(place).parent) for spec in self.beside.values() for place in _places(spec)]
        package.__path__ = sorted({*parents}, key=lambda place: others.index(place) if place in others else len(others))
        if not isinstance(builtins.__import__, _Statement):
            builtins.__import__ = _Statement(builtins.__import__, self)


def _found(room: str, places: Sequence[str]) -> ModuleSpec | None:
    """Find the package that Python would import under the name of a room if shardproof was not installed."""
    for finder in sys.meta_path:
        if isinstance(finder, _Leading) or not hasattr(finder, "find_spec"):
            continue
        spec = PathFinder.find_spec(room, places) if finder is PathFinder else finder.find_spec(room, None, None)
        if spec is not None and not _is_ours(spec):
            return spec
    return None


class _Statement:
    """The statement `import` once there are packages beside ours: theirs for theirs, ours for ours."""

    def __init__(self, original: Any, finder: _Leading) -> None:
        self._original = original
        self._finder = finder

    def __call__(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002  (Python's names)
        locals: Mapping[str, Any] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """As `__import__`. A statement comes with fromlist None or words; pickle and other functions, which give none,
        mean the name in `sys.modules`.
        """
        room, _, rest = name.partition(".")
        spec = self._finder.beside.get(room)
        stated = fromlist is None or (isinstance(fromlist, tuple) and bool(fromlist))
        ours = str((globals or {}).get("__file__", "")).startswith(_OURS)
        words = (rest.partition(".")[0],) if rest else fromlist or ()
        if level or spec is None or not stated or ours or not _holds(spec, words):
            return self._original(name, globals, locals, fromlist, level)
        found = self._original(f"{_BESIDE}.{name}", globals, locals, fromlist, 0)
        return found if fromlist else getattr(found, room)


def _holds(spec: ModuleSpec, words: Sequence[str]) -> bool:
    """Whether the package is meant: a folder without `__init__.py` only for a module that is in it."""
    return spec.origin is not None or any(PathFinder.find_spec(word, _places(spec)) is not None for word in words)
