"""Plants a bug from outside: our implementation is imported anew with one source file changed, beside the right one.

The product's code holds no switches. `plant_subject` gives the subject of a second copy of the packages whose file was
changed. The running process gets its own modules back before `plant_subject` returns, so right and wrong live side by
side. A bug in `reference` moves the dense model as well: `planted_everywhere` is the second copy for truth and ranks
alike.
"""

import builtins
import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

from shardproof.bugs.anchors import change_sources, package_of, source_of
from shardproof.bugs.record import Change

Subject = Callable[..., Any]
"""A subject of ours with a bug in it."""
_ONE_AT_A_TIME = threading.RLock()
"""Ranks that are threads share their modules."""


def replace_text(module: str, old: str, new: str) -> dict[str, str]:
    """The changed source of a module in which the one occurrence of `old` reads `new`, letter by letter if it can be.

    Raises AnchorLost, a ValueError, when it does not occur once.
    """
    text = source_of(module)
    if text.count(old) == 1:
        return {module: text.replace(old, new)}
    return change_sources(module, (Change(module=module, old=old, new=new),))


class _Copy(importlib.abc.MetaPathFinder):
    """A second copy of some packages. Its code imports from the copy, even when a function imports later."""

    def __init__(self, packages: Sequence[str], sources: Mapping[str, str]) -> None:
        self._packages, self._sources = tuple(f"{package}." for package in packages), sources
        self._modules: dict[str, ModuleType] = {}
        self._is_found = False

    @contextmanager
    def import_copy(self) -> Iterator[None]:
        """Inside, names of these packages are modules of the copy; afterwards those of the first copy again."""
        if self._is_found:
            yield
            return
        with _ONE_AT_A_TIME:
            first = self._exchange(self._modules)
            sys.meta_path.insert(0, self)
            self._is_found = True
            try:
                yield
            finally:
                self._is_found = False
                sys.meta_path.remove(self)
                self._modules = self._exchange(first)

    def _exchange(self, modules: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
        """Put these modules in place of those that are imported now, and return the latter."""
        taken = {name: sys.modules.pop(name) for name in list(sys.modules) if self._has(name)}
        sys.modules.update(modules)
        for name in (package.removesuffix(".") for package in self._packages):
            above, _, leaf = name.rpartition(".")
            if above in sys.modules:  # `from shardproof import parallel` reads the attribute, not sys.modules
                vars(sys.modules[above]).pop(leaf, None)
                if name in modules:
                    setattr(sys.modules[above], leaf, modules[name])
        return taken

    def _has(self, name: str) -> bool:
        return f"{name}.".startswith(self._packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As other finders do, but with a loader that makes a module of the copy."""
        if not self._has(fullname):
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._sources.get(fullname), self._statement)
        return spec

    def _statement(self, name: str, *words: Any, **more: Any) -> Any:
        """The statement `import` in code of the copy."""
        with self.import_copy() if self._has(name) else nullcontext():
            return builtins.__import__(name, *words, **more)


class _Loader(importlib.abc.Loader):
    """Executes a module of a copy: its own source, or a changed one."""

    def __init__(self, ordinary: Any, source: str | None, statement: Callable[..., Any]) -> None:
        self._ordinary, self._source, self._statement = ordinary, source, statement

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """None: an ordinary module."""
        created: ModuleType | None = self._ordinary.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Execute it with an `import` of its own."""
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._statement}
        if self._source is None:
            self._ordinary.exec_module(module)
        else:
            exec(compile(self._source, str(module.__file__), "exec"), module.__dict__)  # the planted text


def planted_module(sources: Mapping[str, str], module: str) -> ModuleType:
    """A second copy of this module, in which the changed modules have these sources.

    Only the packages that hold a changed module, and the module's own, are imported anew.
    """
    with _Copy(sorted({package_of(name) for name in [*sources, module]}), sources).import_copy():
        return importlib.import_module(module)


@contextmanager
def planted_everywhere(
    sources: Mapping[str, str], packages: Sequence[str] = ("shardproof.parallel", "shardproof.reference")
) -> Iterator[None]:
    """Import these packages, when found by name, from copies with these sources.

    Copies have the dense model and our subject.
    """
    with _Copy(packages, sources).import_copy():
        yield


def plant_subject(sources: Mapping[str, str], subject: str = "shardproof.parallel.subject:subject") -> Subject:
    """The subject, as it is when these modules have these sources."""
    module, _, name = subject.partition(":")
    built: Subject = getattr(planted_module(sources, module), name)
    return built
