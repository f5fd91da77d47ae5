"""Where the folders behind `shardproof` lie, and whether Python would import others of the same names instead.

Their import names are the folder names (`reports`, `parallel` ...), and these are generic: a package of the same name
that comes earlier on `sys.path` would be imported in their place. Checked without importing any of them.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

__all__ = ["HOME", "ROOMS", "ShadowedError", "check", "foreign"]

ROOMS = ("reference", "parallel", "harness", "reports", "suites", "bench")
HOME = Path(__file__).resolve().parents[1]
"""The folder in which `shardproof` and the folders behind it lie side by side."""


class ShadowedError(ImportError):
    """Another package is imported under the name of one of ours; the message names both folders."""


def check(folder: str = "") -> None:
    """Raise ShadowedError for the first room whose name another package has, on `sys.path` or in a folder that is going
    to be searched before it.
    """
    for room in ROOMS:
        if found := (_package_in(folder, room) if folder else "") or foreign(room):
            legal = "rename that one, or call shardproof from another folder and without it on PYTHONPATH"
            raise ShadowedError(
                f"package {room}: {found} is found before {HOME / room}, which shardproof needs; legal: {legal}",
                name=room,
            )


def foreign(room: str) -> str:
    """The place of the package that Python imports under this name, "" when it is ours or when there is none."""
    module = sys.modules.get(room)
    return _place(importlib.util.find_spec(room) if module is None else module.__spec__, room)


def _package_in(folder: str, room: str) -> str:
    """The same, searched in one folder alone; a subfolder without `__init__.py` is no package."""
    spec = PathFinder.find_spec(room, [folder])
    return "" if spec is None or spec.origin is None else _place(spec, room)


def _place(spec: ModuleSpec | None, room: str) -> str:
    if spec is None:
        return ""
    places = list(spec.submodule_search_locations or [str(spec.origin)])
    return "" if any(Path(place).resolve() == HOME / room for place in places) else places[0]
