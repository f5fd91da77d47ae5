"""Whether this machine can hold a case, asked before anything of it is allocated. Sizes are elements; GiB in messages.

The harness knows no model: what a case comes to is asked of the reference, by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from harness.errors import RequestError
from harness.plain_case import PlainCase
from harness.protocols import CaseLike, case_text
from harness.resolve import resolve

__all__ = ["CULPRIT", "FIRST_BATCH", "PARTS", "admit", "memory_bytes"]

PARTS, FIRST_BATCH, CULPRIT = (f"reference.size:{name}" for name in ("parts", "first_batch", "culprit"))

_WIDTH = 8
"""Bytes of an element: the truth is float64, tokens are int64."""
_SHAPES_ALONE = "dry"


def admit(cases: Iterable[CaseLike], engine: str, limit_bytes: int | None = None) -> None:
    """Raise RequestError for the first case that is larger than the memory of this machine, or than the limit.

    Nothing is known of the size of a plain case.
    """
    limit = (memory_bytes() if limit_bytes is None else limit_bytes) // _WIDTH
    count: Callable[[CaseLike], Mapping[str, int]]
    count = resolve(FIRST_BATCH if engine == _SHAPES_ALONE else PARTS)  # type: ignore[assignment]
    blame: Any = resolve(CULPRIT)
    for case in cases:
        if isinstance(case, PlainCase):
            continue
        sizes = count(case)
        if sum(sizes.values()) > limit:
            found = blame(case, limit)
            word = f"{found[0]}={getattr(case, found[0])}: " if found else ""
            legal = f"{found[0]}={found[1]}" if found else "smaller sizes"
            if engine != _SHAPES_ALONE:
                legal += ", --engine dry, or shardproof predict"
            told = ", ".join(f"{what} {_gib(size)}" for what, size in sizes.items())
            what = "its first micro-batch comes" if engine == _SHAPES_ALONE else "dense model and data in float64 come"
            rule = f"{what} to {_gib(sum(sizes.values()))} GiB ({told})"
            raise RequestError(
                f"case {case_text(case)!r}: {word}{rule}, and this machine has {_gib(limit)}; legal: {legal}"
            )


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gib(elements: int) -> str:
    return f"{elements * _WIDTH / 2**30:.3g}"
