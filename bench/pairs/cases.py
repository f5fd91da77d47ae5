"""Cases as the search for default cases sees them: what they cost, where it begins, what makes one worth less."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

from reference.case import Case, CaseError
from reference.case.default_cases import NUMBERS, RANKS
from reference.case.repair import Words, words_of
from reference.language.modes import MODES

__all__ = ["cost", "degenerate", "ranks", "splits", "starts", "total"]

_DEARER = (
    ("packed", 0.015),
    ("dropout", 0.017),
    ("dtype", 0.034),
    ("recompute", 0.023),
    ("zero", 0.017),
    ("optimizer", 0.015),
)
"""Words that make a case take longer, each with seconds of a rank and step."""
_WAYS: tuple[Words, ...] = (
    {},
    {"pp": 2, "layers": 4, "schedule": "interleaved", "chunks": 2, "group": 3, "micro": 3},
    {"cp": 4, "cp_comm": "alltoall-ring", "cp_inner": 2, "seq": 24},
    {"dtype": "float16", "master": "float32", "scaler": "static", "loss_scale": 8.0},
)
"""Where the search begins in every mode and family: words that need several others."""


@lru_cache(maxsize=1)
def starts() -> list[Words]:
    """Legal cases of every mode to begin with."""
    found = []
    for mode in MODES:
        for words in ({**way, "family": family} for way in _WAYS for family in ("gpt", "llama")):
            with suppress(CaseError):
                found.append(words_of(Case.of(**{**NUMBERS, "layers": 1, "steps": 1, "tp": 1, "mode": mode, **words})))
    return found


def cost(words: Words) -> float:
    """About how many seconds a case takes, as measured: a part for itself, and one for every rank and step."""
    a_rank = 0.012 + 0.0375 * (words["layers"] - 1) + sum(seconds for word, seconds in _DEARER if _costs(words, word))
    return float(0.16 + ranks(words) * words["steps"] * a_rank * (0.4 + 0.2 * words["micro"]))


def _costs(words: Words, word: str) -> bool:
    plain = {"recompute": ("none", "selective"), "dtype": ("float64",), "optimizer": ("sgd",)}
    return words[word] not in plain.get(word, (0, False))


def degenerate(case: Case) -> str:
    """What makes a case show less than another one: too few ranks or too many, a factor that is two sizes."""
    axes = {case.tp, case.dp, case.pp, case.cp, case.wp} - {1}
    return "" if 2 <= case.world_size <= RANKS and case.micro not in axes else "ranks or micro-batches"


def splits(words: Words) -> bool:
    """Does the mode of a case split anything?"""
    return bool(words["tp"] > 1 or words["wp"] > 1)


def ranks(words: Words) -> int:
    """The size of its mesh."""
    return int(words["tp"] * words["dp"] * words["pp"] * words["cp"])


def total(found: Sequence[Words]) -> float:
    """What all of these cases cost, in seconds."""
    return sum(map(cost, found))
