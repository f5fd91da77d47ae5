"""The schemes that compose with a mode: their words, and what makes combinations legal. This is the only list of them.

Everything else of a scheme is its room or file in `parallel` and its line in `parallel.registry`. The modes themselves
are `reference.case.modes`. Sources: around.md 13 (pipelines), 14 (context), 15 (data parallelism), 18.1 (legal
combinations).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reference.case.context import WORDS as CONTEXT_WORDS
from reference.case.context import problems as context_problems
from reference.case.data_parallel import WORDS as DATA_PARALLEL_WORDS
from reference.case.data_parallel import parity_problems
from reference.case.data_parallel import problems as data_parallel_problems
from reference.case.pipeline import WORDS as PIPELINE_WORDS
from reference.case.pipeline import problems as pipeline_problems
from reference.case.randomness import WORDS as RANDOMNESS_WORDS
from reference.case.randomness import problems as randomness_problems
from reference.case.recompute import WORDS as RECOMPUTE_WORDS
from reference.case.recompute import problems as recompute_problems

__all__ = ["SCHEMES", "Problem", "Scheme"]

Problem = tuple[str, str, str]
"""Key, the rule it breaks, a legal value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A scheme that composes with a mode: its words with the values that switch them off, and the rules it adds.

    `problems` yields every broken rule of a case's values, combinations with other schemes included. `axis` is the word
    whose ranks the others are about: a case that is changed to one such rank has their defaults again.
    """

    words: Mapping[str, Any]
    problems: Callable[[Mapping[str, Any]], Iterator[Problem]]
    axis: str = ""


SCHEMES: dict[str, Scheme] = {
    "context parallelism": Scheme(words=CONTEXT_WORDS, problems=context_problems, axis="cp"),
    "data parallelism": Scheme(words=DATA_PARALLEL_WORDS, problems=data_parallel_problems),
    "replica parity": Scheme(words={"parity": 0}, problems=parity_problems),
    "pipeline parallelism": Scheme(words={"pp": 1, **PIPELINE_WORDS}, problems=pipeline_problems, axis="pp"),
    "recomputation": Scheme(words=RECOMPUTE_WORDS, problems=recompute_problems),
    "randomness": Scheme(words=RANDOMNESS_WORDS, problems=randomness_problems),
}
"""Name -> the scheme."""
