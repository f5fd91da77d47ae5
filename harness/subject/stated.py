"""What a subject states of itself: the closed form of its ledger, rank lists of its own rank order, initial values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_type_hints

from harness.protocols import Axes, CaseLike, Subject
from harness.subject.call import Unanswered, answered
from harness.terms import EventKey, Term, closed_forms

_TERM: Mapping[str, type] = {**get_type_hints(EventKey), "calls": int}


def stated(case: CaseLike, subject: Subject) -> tuple[Term, ...] | None:
    """The subject's closed form of this case, None when it states none. Raises Unanswered when it cannot be read."""
    return answered("expected", lambda: _stated(case, subject))


def _stated(case: CaseLike, subject: Subject) -> tuple[Term, ...] | None:
    expected: Callable[[CaseLike], object] | None = getattr(subject, "expected", None)
    found = None if expected is None else expected(case)
    if found is None:
        return None
    every: tuple[object, ...] = tuple(found)  # type: ignore[arg-type]
    terms = tuple(term if isinstance(term, Term) else _complete(term) for term in every)
    if any(term.at for term in terms):
        closed_forms(terms, (0,), named_axes(case, subject))  # raises for an axis that is none of the case's
    return terms


def deviations(case: CaseLike, subject: Subject) -> Mapping[str, float]:
    """The standard deviation of initial values by parameter, 0 for a constant; none where the subject states none.

    Raises Unanswered when they cannot be read.
    """
    return answered("deviations", lambda: _deviations(case, subject))


def _deviations(case: CaseLike, subject: Subject) -> Mapping[str, float]:
    stating: Callable[[CaseLike], Any] | None = getattr(subject, "deviations", None)
    said = {} if stating is None else stating(case)
    if not isinstance(said, Mapping) or not all(isinstance(one, int | float) and one >= 0 for one in said.values()):
        raise TypeError(f"deviations={said!r} must map parameters to numbers; legal: {{'up.weight': 0.02}}")
    return {str(name): float(one) for name, one in said.items()}


def _complete(term: object) -> Term:
    """A term of another type, which may leave nothing out. Raises TypeError when it does."""
    for field, kind in _TERM.items():
        if not isinstance(getattr(term, field, None), kind):
            what = f"{type(term).__name__} has no {field} of type {kind.__name__}, so it is no term"
            raise TypeError(f"{what}; a term has {', '.join(_TERM)}; a shardproof.Term may leave some out")
    complete = Term(**{field: getattr(term, field) for field in _TERM})
    return replace(complete, hidden=bool(getattr(term, "hidden", False)), at=dict(getattr(term, "at", {})))


def orders(case: CaseLike, subject: Subject) -> Axes:
    """The rank lists that the subject states for axes of its own rank order, none when it states none.

    Raises Unanswered for an axis whose lists do not hold every rank of the case's world exactly once.
    """
    return answered("axes", lambda: _orders(case, subject))


def named_axes(case: CaseLike, subject: Subject) -> Axes:
    """By what groups of a run are named: the case's axes, and the subject's own where it states them as it must."""
    try:
        return {**case.axes, **orders(case, subject)}
    except Unanswered:  # the check of groups says so
        return case.axes


def _orders(case: CaseLike, subject: Subject) -> Axes:
    stating: Callable[[CaseLike], Any] | None = getattr(subject, "axes", None)
    said = None if stating is None else stating(case)
    if said is None:
        return {}
    if not isinstance(said, Mapping):
        raise TypeError(f"axes={said!r} must map axes to rank lists; legal: {{'tp': ((0, 1), (2, 3))}}")
    return {str(axis): _lists(str(axis), lists, case) for axis, lists in said.items()}


def _lists(axis: str, said: Any, case: CaseLike) -> tuple[tuple[int, ...], ...]:
    """The rank lists of one axis; raises ValueError unless they hold every rank once, in groups of the case's size."""
    own, world = case.axes.get(axis, ()), list(range(case.world_size))
    legal = own or (tuple(world),)
    try:
        lists = tuple(tuple(int(rank) for rank in ranks) for ranks in said)
    except TypeError:
        lists = ()
    if sorted(rank for ranks in lists for rank in ranks) != world:
        raise ValueError(f"axis {axis}={said!r}: every rank of {len(world)} must be in one rank list; legal: {legal}")
    if own and {len(ranks) for ranks in lists} != {len(ranks) for ranks in own}:
        raise ValueError(f"axis {axis}={said!r}: the case has groups of {len(own[0])} ranks; legal: {legal}")
    return lists
