"""Finds the modules that are a program's own, so that every rank that is a thread imports them for itself.

All others belong to Python, torch, shardproof or an installed package, and threads share them. A shared package that
asks for its rank may keep the answer for the process, as accelerate does; then ranks cannot be threads.
"""

import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_MAIN, _OURS = "__main__", __name__.partition(".")[0]
_OF_TORCH = re.compile(r"^\s*(import|from) torch\b", re.MULTILINE)
_ASKS = re.compile(r"\b(get_rank|get_world_size|LOCAL_RANK)\b")


class OwnModules:
    """The program's own modules in sys.modules, as a place of state (harness.engines.threads.rank_state.Namespace)."""

    def __init__(self) -> None:
        self._installed_in = tuple(f"{Path(sysconfig.get_path(name))}/" for name in ("purelib", "platlib"))
        standard = [f"{Path(sysconfig.get_path(name))}/" for name in ("stdlib", "platstdlib")]
        self._shared = (*self._installed_in, *standard, f"{torch.__path__[0]}/")
        self._before = frozenset(sys.modules)
        self._own = {_MAIN: True}

    def read(self) -> dict[str, Any]:
        """The rank's own modules by name."""
        return {name: module for name, module in list(sys.modules.items()) if self._is_own(name, module)}

    def write(self, names: dict[str, Any]) -> None:
        """Replace the program's own modules in sys.modules by these."""
        for name in self.read().keys() - names.keys():
            del sys.modules[name]
        sys.modules.update(names)

    def find_shared_state(self) -> str | None:
        """Why ranks cannot be threads with an installed package that the program has imported; None if they can."""
        for module in self._find_installed():
            text = Path(module.__file__ or "").read_text(encoding="utf-8", errors="replace")
            if _OF_TORCH.search(text) and _ASKS.search(text):
                package = module.__name__.partition(".")[0]
                return (
                    f"engine=inproc: the package {package} asks for its rank (in {module.__name__}) and may keep the "
                    "answer for the process, which ranks that are threads share; legal: no --engine inproc"
                )
        return None

    def _find_installed(self) -> Iterator[ModuleType]:
        """Modules of installed packages that the program was the first to import."""
        torch_itself = f"{Path(torch.__path__[0])}/"
        for name, module in sorted(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            installed = file.startswith(self._installed_in) and not file.startswith(torch_itself)
            if installed and name not in self._before and file.endswith(".py"):
                yield module

    def _is_own(self, name: str, module: Any) -> bool:
        known = self._own.get(name)
        if known is None:
            other = name in self._before or name.partition(".")[0] == _OURS
            known = self._own[name] = not other and self._lies_outside(module)
        return known

    def _lies_outside(self, module: Any) -> bool:
        """Whether a module lies in none of the shared files and folders."""
        places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
        files = [str(Path(place).absolute()) for place in places if place]
        return bool(files) and not any(file.startswith(self._shared) for file in files)
