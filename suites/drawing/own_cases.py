"""Cases to draw for a subject with words of its own: near the cases that it names, from its strategy, at other layouts.

A case near another has any seed, 2 or 3 steps, 1 to 3 micro-batches, and any legal value of a word that lists its
values and is at its default. The axes stay, since the subject has named the layouts that it supports. So do words that
a property fixes.

Another layout of the same training has as many samples in a step, on other ranks, as far as the subject takes it. A
case of ours changes its mode and axes, and what data ranks share. A case in a subject's own words takes the axes of
another case that the subject names.
"""

from collections.abc import Mapping
from contextlib import suppress
from random import Random
from typing import Any

from hypothesis import strategies as st

from shardproof.harness.errors import RequestError
from shardproof.harness.mesh_axes import AXES, EXPERT_AXES
from shardproof.harness.plain_case import COMMON, PlainCase
from shardproof.harness.protocols import CaseLike
from shardproof.harness.subject import NamedSubject, claims, draws, own_cases, refusal

_DRAWN: Mapping[str, st.SearchStrategy[Any]] = {
    "steps": st.integers(2, 3),
    "micro": st.sampled_from((3, 2, 1)),
    "seed": st.integers(0, 2**31 - 1),
}


def cases_around(subject: NamedSubject, mode: str, fixed: Mapping[str, Any]) -> st.SearchStrategy[PlainCase]:
    """A strategy of cases of this mode with these fixed words. Raises RequestError if the subject's strategy is
    invalid.
    """
    own = draws(subject)
    if own is not None and not isinstance(own, st.SearchStrategy):
        rule = f"draws={own!r} must be a hypothesis strategy of cases, or a function that returns one"
        raise RequestError(f"subject={subject.name}: {rule}; legal: draws = st.sampled_from(cases)")
    if own is not None:
        return own.filter(lambda case: case.mode == mode).map(lambda case: case.but(**fixed))
    named = [case for case in own_cases(subject) or () if isinstance(case, PlainCase) and case.mode == mode]
    return st.sampled_from(named).flatmap(lambda case: _near(case, fixed))


def _near(case: PlainCase, fixed: Mapping[str, Any]) -> st.SearchStrategy[PlainCase]:
    """Cases that differ from this one in words that do not depend on the layout."""
    choices = {key: st.sampled_from(legal) for key, legal in case.vocabulary.words if key in case.vocabulary.closed}
    free = {key: words for key, words in {**_DRAWN, **choices}.items() if key not in fixed and _may_vary(key, case)}
    return st.fixed_dictionaries(free).map(lambda words: case.but(**{**words, **fixed}))


def _may_vary(key: str, case: PlainCase) -> bool:
    """Whether a word of a named case may change: not mode, axes or dtype, nor a word that the case sets itself.

    A word that the case sets is its purpose; steps, micro and seed may change all the same.
    """
    if key in ("mode", "dtype", *AXES, *EXPERT_AXES):
        return False
    defaults = {word: legal[0] for word, legal in case.vocabulary.words}
    return key in COMMON or dict(case.values)[key] == defaults[key]


_TRIES = 60
_SIZES = {"tp": (1, 2, 3, 4, 6), "wp": (1, 2, 3), "zero": (0, 0, 1, 2, 3)}
_OF_EXPERTS = {"ep": (1, 1, 2, 3), "etp": (0, 1, 2)}
_OTHER = (1, 1, 2)
"""Sizes of every further axis of a mesh."""


def another_layout(case: CaseLike, subject: NamedSubject, worlds: tuple[int, ...], chosen: Random) -> CaseLike:
    """The case at another layout with as many ranks as one of these worlds has; itself if none is found."""
    samples = case.micro * getattr(case, "dp", 1)
    for _ in range(_TRIES):
        words = (
            _draw_named(subject, chosen) if isinstance(case, PlainCase) else _draw_words(case, subject, samples, chosen)
        )
        ranks = words.get("dp", 1)
        if samples % ranks:
            continue
        with suppress(ValueError):  # the layout breaks a rule
            other = case.but(**words, micro=samples // ranks)
            if other.axes != case.axes and other.world_size in worlds and not refusal(other, subject):
                return other
    return case


def _draw_named(subject: NamedSubject, chosen: Random) -> dict[str, Any]:
    one = chosen.choice(own_cases(subject) or ())
    return {axis: getattr(one, axis) for axis in (*AXES, *EXPERT_AXES) if hasattr(one, axis)}


def _draw_words(case: CaseLike, subject: NamedSubject, samples: int, chosen: Random) -> dict[str, Any]:
    sizes = {**_SIZES, **(_OF_EXPERTS if getattr(case, "experts", 0) else {})}
    words: dict[str, Any] = {word: chosen.choice(values) for word, values in sizes.items() if hasattr(case, word)}
    words |= {axis: chosen.choice(_OTHER) for axis in getattr(case, "mesh", ()) if axis not in ("tp", "dp")}
    words["dp"] = chosen.choice([size for size in range(1, samples + 1) if samples % size == 0])
    modes = claims(subject).modes
    return {**words, "mode": chosen.choice((case.mode, *modes))}
