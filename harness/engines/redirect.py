"""Redirects torch's own functions inside torch's wrappers, so that names imported earlier are redirected as well."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType
from typing import Any

import torch

__all__ = ["redirected"]


@contextmanager
def redirected(function: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """In the body, `function` is `replacement`, which is given the original first. Raises ImportError if it cannot."""
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
    raise ImportError(f"torch {torch.__version__}'s {function.__name__} cannot be redirected")
