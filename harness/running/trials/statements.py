"""Statements of a subject and the dense model about a case: its closed form, rank orders, initial values.

A question without an answer is noted as a problem of the check that needs it.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from shardproof.harness.protocols import Axes, TermLike
from shardproof.harness.running.trials.trial import Trial
from shardproof.harness.subject import Unanswered, deviations, orders, stated

T = TypeVar("T")


def expectation_of(trial: Trial) -> tuple[TermLike, ...] | None:
    """The subject's closed form, None when it states none; a closed form that raises is noted as a problem."""
    return asked(trial, "expectation", lambda: stated(trial.case, trial.subject.call), None)


def orders_of(trial: Trial) -> Axes:
    """The subject's own rank orders, none when it states none; rank lists that are none are noted as a problem."""
    return asked(trial, "groups", lambda: orders(trial.case, trial.subject.call), {})


def deviations_of(trial: Trial) -> Mapping[str, float]:
    """Statements of the subject, or else the reference, about initial values."""
    none: Mapping[str, float] = {}
    own = asked(trial, "initial_values", lambda: deviations(trial.case, trial.subject.call), none)
    model = trial.reference.model
    return own or (model.initial_deviations(trial.case) if model else {})


def asked(trial: Trial, check: str, ask: Callable[[], T], without: T) -> T:
    """Statement of the subject about itself; `without`, and a problem of this check, when its own code fails."""
    try:
        return ask()
    except Unanswered as problem:  # no verdict on the run, and it must not read as if nothing were stated
        trial.problems[check] = str(problem)
        return without
