"""Systems that are no packages: their code is imported as it is, from a checkout that an environment variable names."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class StandIns(MetaPathFinder, Loader):
    """Finds packages that are not here, with all their modules: each is a mock, and so is what is imported from it."""

    def __init__(self, names: str) -> None:
        self.names = {name for name in names.split() if find_spec(name) is None}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        known = fullname.partition(".")[0] in self.names
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __version__="0")

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def checkout(variable: str, below: str = "", stand_ins: str = "") -> Iterator[None]:
    """Import from the folder `below` the checkout, with stand-ins for packages, such as kernels of a GPU."""
    folder = os.environ.get(variable, "")
    if not folder:
        raise ImportError(f"{variable} names no checkout: set it to the folder of one")
    finder = StandIns(stand_ins)
    sys.path.insert(0, str(Path(folder, below)))
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.path.pop(0)
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in finder.names]:
            del sys.modules[name]
