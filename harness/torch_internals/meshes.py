"""Keeps the device meshes of ranks apart that are threads of one process.

Meshes of different ranks hold the same rank numbers, so they are equal. torch's process-wide tables of what a
redistribution does, which differs between ranks where shards are uneven, would serve one rank with another's. torch
distinguishes meshes by thread when the backend is its own "threaded" one. During a run rank threads appear to have that
backend, with a number for the thread that no other rank and no other run has. Afterwards these tables are emptied.

Uses the names get_backend and threading in torch.distributed.device_mesh, and caches of torch.distributed.tensor; where
they are missing, meshes of different ranks are equal.

torch.distributed.nn.functional is imported here because its functions take the world of the moment of their import as
the default group. No rank's world may be that.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch.distributed.nn.functional  # noqa: F401
from torch.distributed import device_mesh

_TABLES = {
    "torch.distributed.tensor._redistribute": ("_gen_transform_infos.cache_clear", "clear_redistribute_planner_cache"),
    "torch.distributed.tensor._collective_utils": ("MeshTopoInfo.build_from_mesh.cache_clear",),
}
_RANKS = 2**20
"""More ranks than any run has: the numbers of one run do not reach into another's."""


@contextmanager
def kept_apart(rank_of_thread: Callable[[], int | None]) -> Iterator[None]:
    """Within it the meshes that rank threads make differ; `rank_of_thread` is None elsewhere."""
    module: Any = device_mesh
    first = time.monotonic_ns() // 1000 % 2**40 * _RANKS
    get_backend, threads = getattr(module, "get_backend", None), getattr(module, "threading", None)
    if get_backend is None or threads is None:
        yield
        return

    def told_backend(*arguments: Any, **words: Any) -> Any:
        threaded = not arguments and not words and rank_of_thread() is not None
        return "threaded" if threaded else get_backend(*arguments, **words)

    def number_of_thread() -> int:
        rank = rank_of_thread()
        return threading.get_ident() if rank is None else first + rank

    module.get_backend = told_backend
    module.threading = SimpleNamespace(get_ident=number_of_thread, local=threading.local)
    try:
        yield
    finally:
        module.get_backend, module.threading = get_backend, threads
        _empty_tables()


def _empty_tables() -> None:
    for name, tables in _TABLES.items():
        for table in tables if name in sys.modules else ():
            target: Any = sys.modules[name]
            for part in table.split("."):
                target = getattr(target, part, None)
            if target is not None:
                target()
