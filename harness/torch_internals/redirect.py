"""Redirects torch's own functions inside torch's wrappers, so that names imported earlier are redirected as well."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType
from typing import Any

import torch.distributed as dist

from harness.torch_internals.lookup import Probe, lacking


@contextmanager
def redirected(function: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """In the body, `function` is `replacement`, which is given the original first. Raises MachineError if it cannot."""
    cell = _inner(function)
    original = cell.cell_contents
    cell.cell_contents = functools.update_wrapper(functools.partial(replacement, original), original)
    try:
        yield
    finally:
        cell.cell_contents = original


def _inner(function: Callable[..., Any]) -> CellType:
    """The cell through which torch's logging wrapper reaches the function itself."""
    cells: tuple[CellType, ...] = getattr(function, "__closure__", None) or ()
    for cell in cells:
        if getattr(cell.cell_contents, "__name__", "") == function.__name__:
            return cell
    raise lacking("the world of an engine", f"wrapper that holds {function.__name__}")


def _is_redirected() -> bool:
    calls: list[str] = []
    with redirected(dist.init_process_group, lambda _original, *words, **_named: calls.append(str(*words))):
        dist.init_process_group("nothing")
    return calls == ["nothing"]


PROBES = (
    Probe(
        feature="init_process_group and split_group redirected where user code imported them earlier",
        names="the closure of torch's logging wrapper",
        otherwise="neither the in-process engine nor the pool: MachineError",
        works=_is_redirected,
    ),
)
