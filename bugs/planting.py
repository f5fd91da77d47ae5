"""Plants a bug from outside: our implementation is imported anew with one source file changed, beside the right one.

The product's code holds no switches. `planted` gives the subject of a second copy of the packages whose file was
changed; the running process gets its own modules back before it returns, so right and wrong live side by side. A bug in
`reference` moves the dense model as well: `planted_everywhere` is the second copy for truth and ranks alike.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

from bugs.anchors import changed, found, source_of
from bugs.record import Change

__all__ = ["Subject", "patched", "planted", "planted_everywhere", "planted_module", "replaced", "source_of"]

Subject = Callable[..., Any]
"""A subject of ours with a bug in it."""
_ONE_AT_A_TIME = threading.RLock()
"""Ranks that are threads share their modules."""


def replaced(module: str, old: str, new: str) -> dict[str, str]:
    """The changed source of a module in which the one occurrence of `old` reads `new`, letter by letter if it can be.

    Raises AnchorLost, a ValueError, when it does not occur once.
    """
    text = source_of(module)
    if text.count(old) == 1:
        return {module: text.replace(old, new)}
    return changed(module, (Change(module=module, old=old, new=new),))


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the changed modules before the ordinary finders do, and executes their changed text."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.sources:
            return None
        ordinary = importlib.machinery.PathFinder.find_spec(fullname, path)
        if ordinary is None or ordinary.origin is None:
            return None
        return importlib.util.spec_from_file_location(fullname, ordinary.origin, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        code = compile(self.sources[module.__name__], str(module.__file__), "exec")
        exec(code, module.__dict__)  # the planted text of our own source


@contextmanager
def _second_copy(packages: Sequence[str]) -> Iterator[None]:
    """Inside, the packages import anew; afterwards the first copies are back."""

    def ours(name: str) -> bool:
        return name.split(".", maxsplit=1)[0] in packages

    first = {name: sys.modules.pop(name) for name in list(sys.modules) if ours(name)}
    try:
        yield
    finally:
        for name in [name for name in sys.modules if ours(name)]:
            del sys.modules[name]
        sys.modules.update(first)


@contextmanager
def _changed(sources: Mapping[str, str], packages: Sequence[str]) -> Iterator[None]:
    """Inside, these packages import anew, the changed modules with these sources."""
    finder = _Changed(sources)
    with _ONE_AT_A_TIME, _second_copy(packages):
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)


def planted_module(sources: Mapping[str, str], module: str) -> ModuleType:
    """A second copy of this module, in which the changed modules have these sources.

    Only the packages that hold a changed module, and the module's own, are imported anew.
    """
    with _changed(sources, sorted({name.split(".")[0] for name in [*sources, module]})):
        return importlib.import_module(module)


@contextmanager
def planted_everywhere(
    sources: Mapping[str, str], packages: Sequence[str] = ("parallel", "reference")
) -> Iterator[None]:
    """Inside, whoever finds something in these packages by its name gets it from copies with these sources: the dense
    model, the statements about the data, and our subject.
    """
    with _changed(sources, packages):
        yield


def planted(sources: Mapping[str, str], subject: str = "parallel.subject:subject") -> Subject:
    """The subject as it is when these modules have these sources."""
    module, _, name = subject.partition(":")
    built: Subject = getattr(planted_module(sources, module), name)
    return built


@contextmanager
def patched(name: str, changes: tuple[Change, ...]) -> Iterator[None]:
    """Inside, functions of a package that cannot be imported twice run changed code, in every thread.

    Raises AnchorLost for a bug without a place.
    """
    swaps = []
    for module, text in changed(name, changes).items():
        loaded = importlib.import_module(module)
        every = dict(_codes(compile(text, str(loaded.__file__), "exec")))
        for within in {change.within for change in changes if found(change).module == module}:
            function: Any = loaded
            for part in within.split("."):
                function = getattr(function, part)
            swaps.append((inspect.unwrap(function), every[within]))
    right = [function.__code__ for function, _ in swaps]
    for function, code in swaps:
        function.__code__ = code
    try:
        yield
    finally:
        for (function, _), code in zip(swaps, right, strict=True):
            function.__code__ = code


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Qualified name and code of everything inside."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one.co_qualname, one
            yield from _codes(one)
