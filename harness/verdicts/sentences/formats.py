"""Texts of names, ranks and numbers in sentences."""

import math
from collections.abc import Iterable, Sequence

_LISTED = 5
"""The most names in a list; the number of the others follows."""
_LISTS = 4
"""The most rank lists in a list."""

_ROUNDING = 2.0**-40
"""Factors are quotients of sums in float64, which rounding leaves exact to some 40 bits."""


def describe_factor(factor: float) -> str:
    """A factor in words, with the digits in which it differs from 1 beyond rounding: "0.3333 x", "1.0000031 x"."""
    off = abs(factor - 1)
    digits = 4 - min(0, math.floor(math.log10(off))) if _ROUNDING < off < 0.1 else 4
    return f"{factor:.{digits}g} x"


def join_names(names: Sequence[str]) -> str:
    """Names as sentences print them: "a, b and 3 more"."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"


def join_lists(lists: Iterable[Sequence[int]]) -> str:
    """Rank lists as sentences print them, each once: "[0, 1] [2, 3]"."""
    texts = sorted({str(sorted(ranks)) for ranks in lists})
    return " ".join(texts[:_LISTS]) + (f" and {len(texts) - _LISTS} more" if len(texts) > _LISTS else "")
