"""The subject's own code asked under a guard: whatever it raises, or leaves with, is told in one sentence.

`called` is its program on a rank; `answered` is for what it says of itself, its optional attributes (see
`harness.protocols`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from harness.errors import RequestError, error_text
from harness.protocols import Axes, CaseLike, Subject, TermLike, Value

__all__ = ["Unanswered", "answered", "called", "named_axes", "offers", "orders", "stated"]

T = TypeVar("T")
LEFT = "left with status 0 (sys.exit) and returned nothing"

_TERM: Mapping[str, type] = {
    **dict.fromkeys(("phase", "region", "op", "reduce_op", "axis", "dtype"), str),
    **dict.fromkeys(("group_size", "payload_bytes", "calls"), int),
}


class Unanswered(RequestError):
    """The subject's own words about itself failed; the message is one sentence."""


def called(subject: Subject, case: CaseLike, device: torch.device) -> Mapping[str, Value]:
    """What the subject returns on this rank. An end with status 0 is no outcome: it is raised with words."""
    try:
        return subject(case, device)
    except SystemExit as end:
        if end.code:
            raise
        raise SystemExit(LEFT).with_traceback(end.__traceback__) from None


def answered(question: str, ask: Callable[[], T]) -> T:
    """What `ask` gets from the subject. Raises Unanswered for whatever its code raises, sys.exit too."""
    try:
        return ask()
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        raise Unanswered(f"subject.{question} failed: {error_text(problem)}") from problem


def offers(subject: Subject, attribute: str) -> bool:
    """Whether the subject has this attribute. One that raises when it is read is there, and fails where it is asked."""
    try:
        return getattr(subject, attribute, None) is not None
    except Exception:
        return True


def stated(case: CaseLike, subject: Subject) -> tuple[TermLike, ...] | None:
    """The subject's closed form of this case, None when it states none. Raises Unanswered when it cannot be read."""
    return answered("expected", lambda: _stated(case, subject))


def _stated(case: CaseLike, subject: Subject) -> tuple[TermLike, ...] | None:
    expected: Callable[[CaseLike], object] | None = getattr(subject, "expected", None)
    found = None if expected is None else expected(case)
    if found is None:
        return None
    terms = tuple(found)  # type: ignore[var-annotated, arg-type]
    for term in terms:
        for field, kind in _TERM.items():
            if not isinstance(getattr(term, field, None), kind):
                what = f"{type(term).__name__} has no {field} of type {kind.__name__}"
                raise TypeError(f"{what}, so it is no term; a term has {', '.join(_TERM)}")
    return terms


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
