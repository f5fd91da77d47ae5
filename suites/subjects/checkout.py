"""Systems that are no packages: their code is imported as it is, from a checkout that an environment variable names.
Their subjects share what follows: a session on CPUs, weights that depend on name and seed, the tokens of samples.
"""

import os
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from shardproof import Shard, cuda_on_cpu


class StandIns(MetaPathFinder, Loader):
    """Finds packages that are not here, with all their modules: each is a mock, and so is what is imported from it."""

    def __init__(self, names: str) -> None:
        self.names = {name for name in names.split() if find_spec(name) is None}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """See MetaPathFinder."""
        known = fullname.partition(".")[0] in self.names
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> Any:
        """See Loader."""
        return mock.MagicMock(name=spec.name, __version__="0")

    def exec_module(self, module: ModuleType) -> None:
        """See Loader: there is nothing to run."""


@contextmanager
def checkout(variable: str, below: str = "", stand_ins: str = "") -> Iterator[None]:
    """Import from `below` the checkout, with stand-ins for packages (GPU kernels). Raises ImportError without one."""
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


@contextmanager
def on_cpu(**environment: str) -> Iterator[None]:
    """Answer CUDA's questions for the CPU, without warnings; values that a layer rounds to float32 stay float64."""
    rounded, norm_of = torch.Tensor.float, torch.linalg.vector_norm

    def exact(tensor: torch.Tensor) -> Any:
        return tensor if tensor.dtype == torch.float64 else rounded(tensor)

    def norm(tensor: torch.Tensor, *args: Any, dtype: Any = None, **words: Any) -> Any:
        return norm_of(tensor, *args, dtype=None if tensor.dtype == torch.float64 else dtype, **words)

    with ExitStack() as entered:
        entered.enter_context(cuda_on_cpu())
        entered.enter_context(warnings.catch_warnings(action="ignore"))
        entered.enter_context(mock.patch.dict(os.environ, environment))
        entered.enter_context(mock.patch.object(torch.Tensor, "float", exact))
        entered.enter_context(mock.patch.object(torch.linalg, "vector_norm", norm))
        yield


def fill(case: Any, name: str, parts: Sequence[Shard]) -> None:
    """Set the parts of a weight to those of the full one of this name, the same for every layout."""
    draws = torch.Generator().manual_seed(case.seed + zlib.crc32(name.encode()))
    whole = 0.3 * torch.randn(parts[0].global_shape, generator=draws, dtype=torch.float64)
    for part in parts:
        ends = zip(part.offsets, part.local.shape, strict=True)
        part.local.copy_(whole[tuple(slice(first, first + size) for first, size in ends)])


def tokens_of(numbers: Sequence[int]) -> torch.Tensor:
    """Tokens of the samples of these numbers, 13 of 48 each."""
    draws = [torch.Generator().manual_seed(number) for number in numbers]
    return torch.stack([torch.randint(48, (13,), generator=draw) for draw in draws])
