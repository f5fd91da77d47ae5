"""The subject's own code asked under a guard: whatever it raises, or leaves with, is told in one sentence.

`called` is its program on a rank; `answered` is for what it says of itself, its optional attributes (see
`harness.protocols`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from harness.errors import RequestError, error_text
from harness.protocols import CaseLike, Subject, TermLike, Value

__all__ = ["Unanswered", "answered", "called", "offers", "stated"]

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
