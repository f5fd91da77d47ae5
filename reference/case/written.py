"""Default cases that are written out, in place of a list of pairs or behind it: rows of `reference.case.designs`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from reference.case.case import Case, CaseError
from reference.case.modes import MODES
from reference.case.rules import write

__all__ = ["SHARED", "spread_cases", "written"]

SHARED: Mapping[str, int | float] = {
    "hidden": 96,
    "heads": 24,
    "ffn": 28,
    "vocab": 268,
    "seq": 12,
    "batch": 5,
    "micro": 3,
    "lr": 0.1,
    "seed": 1,
}
"""Numbers of all covering cases, none the default: an odd part of every size on 4 ranks; micro and batch are no size of
the mesh.
"""
_SMALLER = {**SHARED, "hidden": 48, "heads": 12}
"""The same for words of other schemes, with which no kv_heads is paired: half the heads, each as wide, cost less."""
_RANKS = 8


def written(mode: str, rows: Iterable[str], numbers: Mapping[str, int | float] = SHARED) -> Iterator[Case]:
    """The cases of a mode with the words of these rows and these numbers."""
    shared = " ".join(f"{key}={write(value)}" for key, value in numbers.items())
    return (Case.parse(f"{shared} mode={mode} {words}") for words in rows)


def spread_cases(mode: str, others: Iterable[Case] = ()) -> tuple[Case, ...]:
    """Default cases of a mode with the words of schemes that compose with it: every value of each at least once.

    Each of them is also combined with each of these other cases, which keep their tp, layers and steps and leave out
    the metric, where the rules allow it on up to 8 ranks.
    """
    found = dict.fromkeys(written(mode, MODES[mode].spread, _SMALLER))
    rows = [Case.read_words(row) for row in MODES[mode].spread]
    for base in others:
        for words in rows:
            with suppress(CaseError):
                kept = {"tp": base.tp, "layers": base.layers, "steps": base.steps, "metric": False}
                case = base.but(**{**words, **kept})
                found |= {case: None} if case.world_size <= _RANKS else {}
    return tuple(found)
