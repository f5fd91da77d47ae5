"""Modules that are found by a name, put together here and nowhere else: features, their branches, schemes of a mode."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def module_in(package: str, name: str, import_module: Callable[[str], Any] = import_module) -> Any:
    """Import the module of this name in a package. Code that may be a copy with a planted bug hands in its own import,
    which finds modules of the copy.
    """
    return import_module(f"{package}.{name}")
