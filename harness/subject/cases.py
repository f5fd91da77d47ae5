"""The cases of a subject: in the case language of our decoder, or in its own words; and those that it names itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from harness.cases import read_case
from harness.errors import RequestError
from harness.mesh_axes import AXES
from harness.plain_case import PlainCase, Vocabulary
from harness.protocols import CaseLike
from harness.resolve import resolve
from harness.subject.call import NamedSubject, answered, words_of

__all__ = ["case_of", "cases_of", "domains_of", "draws", "own_cases", "vocabulary"]

DOMAINS = "reference.case.domains:domains"


def vocabulary(subject: NamedSubject) -> Vocabulary | None:
    """The words of the subject's own cases, from its attribute `words`; None for cases of our decoder.

    Raises Unanswered when `words` cannot be read.
    """
    return answered("words", lambda: _vocabulary(subject))


def _vocabulary(subject: NamedSubject) -> Vocabulary | None:
    own = getattr(subject.call, "words", None)
    return None if own is None else Vocabulary.of(own)


def case_of(text: str, subject: NamedSubject) -> CaseLike:
    """The case of this text as this subject reads it. Raises RequestError when it is none."""
    own = vocabulary(subject)
    if own is None:
        case: CaseLike = read_case(text)
        return case
    try:
        return own.parse(text)
    except ValueError as problem:
        raise RequestError(f"case {text!r}: {problem}") from problem


def cases_of(texts: Iterable[str], subject: NamedSubject) -> tuple[CaseLike, ...]:
    """The cases of these texts, each once. Raises RequestError for the first text that is no case."""
    cases = [case_of(text, subject) for text in texts]
    return tuple({str(case): case for case in cases}.values())


def own_cases(subject: NamedSubject) -> tuple[CaseLike, ...] | None:
    """The cases that the subject names in its attribute `cases`, None without it. Raises RequestError for what is no
    tuple of cases, and for one without a case.
    """
    texts = words_of(subject, "cases", "('tp=2 dp=3',)")
    if texts is None:
        return None
    if not texts:
        raise RequestError(f"subject={subject.name}: cases=() names none; legal: cases = ('tp=2 dp=3',)")
    return cases_of(texts, subject)


def domains_of(case: CaseLike, subject: NamedSubject) -> dict[str, tuple[Any, ...]]:
    """Every word of a case that has several values, with these, the plainest first.

    A number of a subject's own words has the values of its default and of the cases that the subject names; of an axis
    and of steps and micro-batches 1 is the plainest.
    """
    if not isinstance(case, PlainCase):
        ours: Any = resolve(DOMAINS)
        return dict(ours())
    named = [one for one in own_cases(subject) or () if isinstance(one, PlainCase)]
    found: dict[str, tuple[Any, ...]] = {}
    for word, legal in case.vocabulary.words:
        fewest = (1,) if word in (*AXES, "steps", "micro") else ()
        flags = (False, True) if isinstance(legal[0], bool) else ()
        values = dict.fromkeys((*fewest, *legal, *flags, *(getattr(one, word) for one in named), getattr(case, word)))
        if word != "seed" and len(values) > 1:
            found[word] = tuple(values)
    return found


def draws(subject: NamedSubject) -> Any:
    """The hypothesis strategy of cases in its attribute `draws`, or what a function of that name returns; None without
    it. Raises Unanswered when that function fails.
    """
    found: Callable[[], Any] | Any = getattr(subject.call, "draws", None)
    return answered("draws", found) if callable(found) else found
