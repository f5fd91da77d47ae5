"""In which order cases are proved, and which of them by one process: those that are one case to the dense model.

What the dense model computed for one of them serves all, when they follow each other in one process. A case that loads
what another one saves follows it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import Any

from harness.plain_case import PlainCase
from harness.protocols import CaseLike
from harness.resolve import resolve
from harness.running.request import folder_of
from harness.running.truth.reference import REFERENCE


def together(cases: Sequence[CaseLike]) -> list[list[int]]:
    """The numbers of the cases, those in one list that follow each other and are one case to the dense model, or of
    which one loads what another one before it saves.
    """
    groups = [list(numbers) for _, numbers in groupby(range(len(cases)), key=lambda number: _alike(cases[number]))]
    found: list[list[int]] = []
    saving: dict[str, list[int]] = {}
    for group in groups:
        earlier = next((saving[word] for number in group if (word := folder_of(cases[number], "load")) in saving), None)
        if earlier is None:
            found.append(group)
        else:
            earlier += group
        home = group if earlier is None else earlier
        saving |= {word: home for number in group if (word := folder_of(cases[number], "save"))}
    return found


def arranged(cases: Iterable[CaseLike]) -> tuple[CaseLike, ...]:
    """The cases with those together that are one case to the dense model, the most ranks and steps first: two processes
    that take such groups in turn then end at nearly the same time.
    """
    groups: dict[CaseLike, list[CaseLike]] = {}
    saving: dict[str, CaseLike] = {}
    for case in cases:
        alike = saving.get(folder_of(case, "load"), _alike(case))
        groups.setdefault(alike, []).append(case)
        saving |= {word: alike for word in [folder_of(case, "save")] if word}
    return tuple(
        chain(*sorted(groups.values(), key=lambda group: -sum(case.world_size * case.steps for case in group)))
    )


def _alike(case: CaseLike) -> CaseLike:
    """The case that stands for all that are one case to the dense model; each plain case for itself."""
    alike: Any = resolve(REFERENCE.alike)
    found: CaseLike = case if isinstance(case, PlainCase) else alike(case)
    return found
