"""Systems that are no packages: their code is imported as it is, from a checkout that an environment variable names."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock


@contextmanager
def checkout(variable: str, below: str = "", stand_ins: str = "") -> Iterator[None]:
    """Import from the folder `below` the checkout. Meanwhile modules of packages that are not installed have stand-ins,
    such as kernels of a GPU: they can be imported, and what is made of them is nothing.
    """
    folder = os.environ.get(variable, "")
    if not folder:
        raise ImportError(f"{variable} names no checkout: set it to the folder of one")
    absent = [name for name in stand_ins.split() if find_spec(name.partition(".")[0]) is None]
    sys.path.insert(0, str(Path(folder, below)))
    sys.modules.update({name: MagicMock(name=name) for name in absent})
    try:
        yield
    finally:
        sys.path.pop(0)
        for name in absent:
            del sys.modules[name]
