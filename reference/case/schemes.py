"""The schemes that compose with a mode: their words, and what makes combinations legal. This is the only list of them.

Everything else of a scheme is its room or file in `parallel` and its line in `parallel.registry`. The modes themselves
are `reference.case.modes`. Sources: around.md 14 (context), 15 (data parallelism), 18.1 (legal combinations).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reference.case import context, data_parallel

__all__ = ["SCHEMES", "Problem", "Scheme"]

Problem = tuple[str, str, str]
"""Key, the rule it breaks, a legal value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A scheme that composes with a mode: its words with the values that switch them off, and the rules it adds.

    `problems` yields every broken rule of a case's values, combinations with other schemes included.
    """

    words: Mapping[str, Any]
    problems: Callable[[Mapping[str, Any]], Iterator[Problem]]


SCHEMES: dict[str, Scheme] = {
    "context parallelism": Scheme(words=context.WORDS, problems=context.problems),
    "data parallelism": Scheme(words=data_parallel.WORDS, problems=data_parallel.problems),
}
"""Name -> the scheme."""
