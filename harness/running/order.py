"""In which order cases are proved, and which of them by one process: those that are one case to the dense model.

What the dense model computed for one of them serves all, when they follow each other in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import Any

from harness.plain_case import PlainCase
from harness.protocols import CaseLike
from harness.resolve import resolve
from harness.running.truth.reference import REFERENCE

__all__ = ["arranged", "together"]


def together(cases: Sequence[CaseLike]) -> list[list[int]]:
    """The numbers of the cases, those in one list that follow each other and are one case to the dense model."""
    return [list(numbers) for _, numbers in groupby(range(len(cases)), key=lambda number: _alike(cases[number]))]


def arranged(cases: Iterable[CaseLike]) -> tuple[CaseLike, ...]:
    """The cases with those together that are one case to the dense model, the most ranks and steps first: two processes
    that take such groups in turn then end at nearly the same time.
    """
    groups: dict[CaseLike, list[CaseLike]] = {}
    for case in cases:
        groups.setdefault(_alike(case), []).append(case)
    return tuple(
        chain(*sorted(groups.values(), key=lambda group: -sum(case.world_size * case.steps for case in group)))
    )


def _alike(case: CaseLike) -> CaseLike:
    """The case that stands for all that are one case to the dense model; each plain case for itself."""
    alike: Any = resolve(REFERENCE.alike)
    found: CaseLike = case if isinstance(case, PlainCase) else alike(case)
    return found
