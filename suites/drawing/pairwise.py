"""The boolean words of a case in rows: six to eight of them have every pair of values of every two words.

Source: Kleitman and Spencer 1973. Words are true in different sets of n/2 of n rows, never in the first: any two meet
in all four pairs of values.
"""

import itertools
from collections.abc import Mapping

from shardproof.reference.language.core import MODES

_EVERYWHERE = ("packed", "bias", "tied", "qk_norm", "fuse_qkv", "overlap", "fuse_mlp")
_ROWS = 6
"""Enough for ten words: there are ten sets of three rows among five."""


def rows(mode: str) -> tuple[Mapping[str, bool], ...]:
    """The boolean words of cases of this mode, row by row; packed data have no attention mask (Megatron's dense one).

    A row in which both would be true is there twice, with one of them each.
    """
    words: tuple[str, ...] = (*_EVERYWHERE, "metric" if MODES[mode].measures else "attention_mask")
    words += ("fuse_weights",) if MODES[mode].gathers_weights else ()
    sets = dict(zip(words, itertools.combinations(range(1, _ROWS), _ROWS // 2), strict=False))
    combinations: list[Mapping[str, bool]] = []
    for row in range(_ROWS):
        values = {word: row in true for word, true in sets.items()}
        if values["packed"] and values.get("attention_mask"):
            combinations += [values | {"packed": False}, values | {"attention_mask": False}]
        else:
            combinations.append(values)
    return tuple(combinations)
