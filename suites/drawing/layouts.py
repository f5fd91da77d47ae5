"""Another layout of the same training: as many samples in a step, on other ranks, as far as the subject takes it.

A case of ours changes its mode and axes, and what data ranks share. A case of a subject's own words takes the axes of
another case that the subject names.
"""

from contextlib import suppress
from random import Random
from typing import Any

from shardproof.harness.mesh_axes import AXES, EXPERT_AXES
from shardproof.harness.plain_case import PlainCase
from shardproof.harness.protocols import CaseLike
from shardproof.harness.subject import NamedSubject, claims, own_cases, refusal

_TRIES = 60
_SIZES = {"tp": (1, 2, 3, 4, 6), "wp": (1, 2, 3), "zero": (0, 0, 1, 2, 3)}
_OF_EXPERTS = {"ep": (1, 1, 2, 3), "etp": (0, 1, 2)}
_OTHER = (1, 1, 2)
"""Sizes of every further axis of a mesh."""


def elsewhere(case: CaseLike, subject: NamedSubject, worlds: tuple[int, ...], chosen: Random) -> CaseLike:
    """The case at another layout on as many ranks as one of these worlds has; itself where none is found."""
    samples = case.micro * getattr(case, "dp", 1)
    for _ in range(_TRIES):
        words = _named(subject, chosen) if isinstance(case, PlainCase) else _drawn(case, subject, samples, chosen)
        ranks = words.get("dp", 1)
        if samples % ranks:
            continue
        with suppress(ValueError):  # a layout that breaks a rule
            other = case.but(**words, micro=samples // ranks)
            if other.axes != case.axes and other.world_size in worlds and not refusal(other, subject):
                return other
    return case


def _named(subject: NamedSubject, chosen: Random) -> dict[str, Any]:
    one = chosen.choice(own_cases(subject) or ())
    return {axis: getattr(one, axis) for axis in (*AXES, *EXPERT_AXES) if hasattr(one, axis)}


def _drawn(case: CaseLike, subject: NamedSubject, samples: int, chosen: Random) -> dict[str, Any]:
    sizes = {**_SIZES, **(_OF_EXPERTS if getattr(case, "experts", 0) else {})}
    words: dict[str, Any] = {word: chosen.choice(values) for word, values in sizes.items() if hasattr(case, word)}
    words |= {axis: chosen.choice(_OTHER) for axis in getattr(case, "mesh", ()) if axis not in ("tp", "dp")}
    words["dp"] = chosen.choice([size for size in range(1, samples + 1) if samples % size == 0])
    modes = claims(subject).modes
    return {**words, "mode": chosen.choice((case.mode, *modes))}
