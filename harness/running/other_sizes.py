"""The same subject in cases with another size: what decides whether a wrong factor comes from a size of the case.

A factor of 1/2 where tp=2 may be a mean over tp or a constant; where tp is another number it is one or the other. Each
size in question is changed alone, and only as much of the case is run as shows the first wrong tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.checking.evidence import Evidence, split_axes
from harness.checking.tolerance import is_state, kind_of, step_of
from harness.protocols import CaseLike
from harness.running.trial import Trial, recorded, watched
from harness.subject import refusal

__all__ = ["elsewhere"]

MOST_RANKS = 8
"""Cases with more ranks are not tried."""
_WORDS = {"all ranks": "dp", "wdp": "dp", "tokens of the step": "micro"}
"""Size that no word of a case sets -> the word that changes it."""


def elsewhere(trial: Trial, evidence: Evidence, sizes: Sequence[str], first: str) -> tuple[Evidence, ...]:
    """Evidence of cases in which one of these sizes is another, as far as the tensor `first` is concerned.

    Sizes that no legal case changes, and runs that end otherwise than with an outcome, are left out.
    """
    later = evidence.case.steps > 1 if kind_of(first) == "param" else is_state(first) and step_of(first) > 0
    if later:
        return ()  # the state before a later step is another one in every case
    found = []
    for word in dict.fromkeys(_WORDS.get(size, size) for size in sizes):
        other = next(
            (seen for case in _changed(evidence.case, word, first) if (seen := _seen(trial, case, first))), None
        )
        found += [other] if other else []
    return tuple(found)


def _changed(case: CaseLike, word: str, first: str) -> Iterator[CaseLike]:
    """Cases in which this word is one more, twice as much, or 1."""
    now = case.micro if word == "micro" else split_axes(case).get(word, 1)
    for value in (now + 1, 2 * now, 1):
        try:
            other = case.but(**{word: value, "steps": max(step_of(first), 0) + 1})
            if value != now and other.world_size <= MOST_RANKS:
                yield other
        except Exception:  # a case that cannot be
            continue


def _seen(trial: Trial, case: CaseLike, first: str) -> Evidence | None:
    """What a run of this case shows; None when there is none."""
    other = replace(trial, case=case, problems={}, known={}, facts={})
    try:
        if refusal(case, trial.subject, trial.name):
            return None
        with trial.timed("elsewhere"):
            seen = recorded(replace(other, seconds={}))
            if kind_of(first) in ("act", "act_grad"):
                seen = watched(replace(other, seconds={}), seen)
            return replace(seen, shares=other.dense(trial.reference.shares, part="explained"))
    except Exception:  # then this case decides nothing
        return None
