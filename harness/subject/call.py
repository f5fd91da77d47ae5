"""The subject itself: found by its name or as it is, called on a rank, and its answers about itself."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from harness.errors import MachineError, RequestError, error_text
from harness.protocols import CaseLike, Subject, Value
from harness.resolve import resolve

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_FRAMES = 3
LEFT = "left with status 0 (sys.exit) and returned nothing"


class Unanswered(RequestError):
    """The subject's own words about itself failed; the message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSubject:
    """A subject and its `name` in messages. `address`, module:object, is where other processes import it; "" for one
    that was given as an object. `truth`, module:object or "alone", was requested in place of its attribute `truth`.
    """

    name: str
    call: Subject
    address: str = ""
    truth: str = ""

    @property
    def sent(self) -> str | Subject:
        """What another process gets: the address, else the object itself."""
        return self.address or self.call

    def __reduce__(self) -> tuple[object, ...]:
        return named, (self.sent, self.truth)


def named(subject: str | Subject | NamedSubject, truth: str = "") -> NamedSubject:
    """The subject of this address, or this object under the name that resolves to it; `truth` as in NamedSubject.

    Raises RequestError when there is none, or when it cannot be called.
    """
    if isinstance(subject, NamedSubject):
        return subject
    address = subject if isinstance(subject, str) else ""
    found: Any = resolve(address) if address else subject
    name = address or _name_of(found)
    if not callable(found):
        raise RequestError(f"subject {name}: must be callable as subject(case, device), not {type(found).__name__}")
    return NamedSubject(name=name, call=found, address=address, truth=truth)


def _name_of(subject: object) -> str:
    module = getattr(subject, "__module__", type(subject).__module__)
    names = vars(sys.modules[module]) if module in sys.modules else {}
    bound = next((name for name, value in names.items() if value is subject), "")
    return f"{module}:{bound or getattr(subject, '__qualname__', type(subject).__qualname__)}"


def called(subject: Subject, case: CaseLike, device: torch.device) -> Mapping[str, Value]:
    """What the subject returns on this rank. Raises SystemExit with words for an end with status 0: no outcome."""
    try:
        return subject(case, device)
    except SystemExit as end:
        if end.code:
            raise
        raise SystemExit(LEFT).with_traceback(end.__traceback__) from None


def answered(question: str, ask: Callable[[], T]) -> T:
    """What `ask` gets from the subject. Raises Unanswered for whatever its code raises, sys.exit too, and MachineError
    as it is: its time was over.
    """
    try:
        return ask()
    except (KeyboardInterrupt, MachineError):
        raise
    except BaseException as problem:
        raise Unanswered(f"subject.{question} failed: {error_text(problem)}{_where(problem)}") from problem


def _where(problem: BaseException) -> str:
    """The innermost lines of the user's code that led to this exception: ", at model.py:7 in forward"."""
    from harness.engines.calls.callers import is_user, shortened  # noqa: PLC0415  (loads torch, which a failed answer may do)

    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if is_user(frame.filename)]
    places = [f"{shortened(frame.filename)}:{frame.lineno} in {frame.name}" for frame in frames[: -_FRAMES - 1 : -1]]
    return f", at {', called from '.join(places)}" if places else ""


@contextmanager
def session(subject: Subject) -> Iterator[None]:
    """The context of `subject.session()`, in which its ranks and its truth run; without it nothing.

    Raises Unanswered when it cannot be entered or left.
    """
    make: Callable[[], AbstractContextManager[object]] | None = getattr(subject, "session", None)
    with ExitStack() as stack:
        if make is not None:
            answered("session", lambda: stack.enter_context(make()))
        yield


def offers(subject: Subject, attribute: str) -> bool:
    """Whether the subject has this attribute. One that raises when it is read is there, and fails where it is used."""
    try:
        return getattr(subject, attribute, None) is not None
    except Exception:
        return True


def words_of(subject: NamedSubject, attribute: str, legal: str) -> tuple[str, ...] | None:
    """The words of this attribute, None without it. Raises RequestError for what is no tuple of words."""
    said = answered(attribute, lambda: getattr(subject.call, attribute, None))
    if said is None:
        return None
    if not isinstance(said, tuple | list) or not all(isinstance(word, str) for word in said):
        rule = f"{attribute}={said!r} must be a tuple of words; legal: {attribute} = {legal}"
        raise RequestError(f"subject={subject.name}: {rule}")
    return tuple(said)
