"""Cases of another size: what decides whether a wrong factor comes from a size of the case.

A factor of 1/2 where tp=2 may be a mean over tp or a constant. Where tp is another number the factor is one or the
other. Each size in question is changed alone. No more steps are run than show the first wrong tensor.
"""

from collections.abc import Iterator, Sequence

from harness.checking.measures.kinds import is_state, kind_of, step_of
from harness.mesh_axes import split_axes
from harness.protocols import CaseLike, unsaved

MOST_RANKS = 8
"""Cases with more ranks are not tried."""
_WORDS = {"all ranks": "dp", "wdp": "dp", "tokens of the step": "micro"}
"""Size that no word of a case sets -> the word that changes it."""


def of_other_sizes(case: CaseLike, sizes: Sequence[str], first: str) -> list[Iterator[CaseLike]]:
    """For each of these sizes the legal cases in which it is another, best ones first.

    `first` is the first wrong tensor. There are none for a state after a later step: it is another one in every case.
    """
    later = case.steps > 1 if kind_of(first) == "param" else is_state(first) and step_of(first) > 0
    words = () if later else dict.fromkeys(_WORDS.get(size, size) for size in sizes)
    return [_changed(case, word, steps=max(step_of(first), 0) + 1) for word in words]


def _changed(case: CaseLike, word: str, steps: int) -> Iterator[CaseLike]:
    """Cases in which this word is one more, twice as much, or 1."""
    now = case.micro if word == "micro" else split_axes(case).get(word, 1)
    for value in dict.fromkeys((now + 1, 2 * now, 1)):
        try:
            other = case.but(**{word: value, "steps": steps, **unsaved(case)})
        except (ValueError, TypeError):  # no legal case; an axis that no word of a case sets
            continue
        if value != now and other.world_size <= MOST_RANKS:
            yield other
