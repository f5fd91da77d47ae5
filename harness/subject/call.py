"""The subject itself: found by its name or given as an object, called on a rank; and its answers about itself.

These are the closed form of its ledger, rank lists of its own rank order, and initial values.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from shardproof.harness.errors import MachineError, RequestError, error_text
from shardproof.harness.protocols import Axes, CaseLike, Subject, Value
from shardproof.harness.resolve import resolve
from shardproof.harness.terms import EventKey, Term, closed_forms

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_FRAMES = 3
LEFT = "left with status 0 (sys.exit) and returned nothing"


class Unanswered(RequestError):
    """The subject's own code about itself failed; the message is one sentence."""


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
        """The subject as another process gets it: the address, else the object itself."""
        return self.address or self.call

    def __reduce__(self) -> tuple[object, ...]:
        return resolve_subject, (self.sent, self.truth)


def resolve_subject(subject: str | Subject | NamedSubject, truth: str = "") -> NamedSubject:
    """The subject of this address, or this object under the name that resolves to it; `truth` as in NamedSubject.

    Raises RequestError if there is none, or if it cannot be called.
    """
    if isinstance(subject, NamedSubject):
        return subject
    address = subject if isinstance(subject, str) else ""
    target: Any = resolve(address) if address else subject
    name = address or _name_of(target)
    if not callable(target):
        raise RequestError(f"subject {name}: must be callable as subject(case, device), not {type(target).__name__}")
    return NamedSubject(name=name, call=target, address=address, truth=truth)


def _name_of(subject: object) -> str:
    module = getattr(subject, "__module__", type(subject).__module__)
    names = vars(sys.modules[module]) if module in sys.modules else {}
    bound = next((name for name, value in names.items() if value is subject), "")
    return f"{module}:{bound or getattr(subject, '__qualname__', type(subject).__qualname__)}"


def call_subject(subject: Subject, case: CaseLike, device: "torch.device") -> Mapping[str, Value]:
    """The outcome of the subject on this rank. Raises SystemExit with a text if it exits with status 0."""
    try:
        return subject(case, device)
    except SystemExit as end:
        if end.code:
            raise
        raise SystemExit(LEFT).with_traceback(end.__traceback__) from None


@contextmanager
def ask_subject(question: str) -> Iterator[None]:
    """A context, or a decorator, of code that asks the subject this question.

    Raises Unanswered for whatever the subject's code raises, sys.exit too. KeyboardInterrupt and MachineError (the time
    was over) are raised unchanged.
    """
    try:
        yield
    except (KeyboardInterrupt, MachineError):
        raise
    except BaseException as problem:
        raise Unanswered(f"subject.{question} failed: {error_text(problem)}{_where(problem)}") from problem


def answer_question(question: str, ask: Callable[[], T]) -> T:
    """The result of `ask`, a question to the subject. Raises Unanswered for what its code raises (`ask_subject`)."""
    with ask_subject(question):
        return ask()


def _where(problem: BaseException) -> str:
    """The innermost lines of the user's code that led to this exception: ", at model.py:7 in forward"."""
    from shardproof.harness.engines.calls.callers import is_user, shorten_path  # noqa: PLC0415  (loads torch, which a failed answer may do)

    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if is_user(frame.filename)]
    places = [f"{shorten_path(frame.filename)}:{frame.lineno} in {frame.name}" for frame in frames[: -_FRAMES - 1 : -1]]
    return f", at {', called from '.join(places)}" if places else ""


@contextmanager
def session(subject: Subject) -> Iterator[None]:
    """The context of `subject.session()`, in which its ranks and its truth run; without it an empty one.

    Raises Unanswered if it cannot be entered, or left after a body that ended well.
    """
    make: Callable[[], AbstractContextManager[object]] | None = getattr(subject, "session", None)
    with ExitStack() as stack:
        if make is not None:
            answer_question("session", lambda: stack.enter_context(make()))
        yield
        answer_question("session", stack.close)


def offers(subject: Subject, attribute: str) -> bool:
    """Whether the subject has this attribute. If reading it raises, the error comes where it is used."""
    try:
        return getattr(subject, attribute, None) is not None
    except Exception:
        return True


def words_of(subject: NamedSubject, attribute: str, legal: str) -> tuple[str, ...] | None:
    """The words of this attribute, None without it. Raises RequestError for anything but a tuple of words."""
    words = answer_question(attribute, lambda: getattr(subject.call, attribute, None))
    if words is None:
        return None
    if not isinstance(words, tuple | list) or not all(isinstance(word, str) for word in words):
        rule = f"{attribute}={words!r} must be a tuple of words; legal: {attribute} = {legal}"
        raise RequestError(f"subject={subject.name}: {rule}")
    return tuple(words)


_TERM: Mapping[str, type] = {**get_type_hints(EventKey), "calls": int}


@ask_subject("expected")
def state_terms(case: CaseLike, subject: Subject) -> tuple[Term, ...] | None:
    """The subject's closed form of this case, None if it states none. Raises Unanswered if it cannot be read."""
    expected: Callable[[CaseLike], object] | None = getattr(subject, "expected", None)
    found = None if expected is None else expected(case)
    if found is None:
        return None
    every: tuple[object, ...] = tuple(found)  # type: ignore[arg-type]
    terms = tuple(term if isinstance(term, Term) else _complete(term) for term in every)
    if any(term.at for term in terms):
        closed_forms(terms, (0,), named_axes(case, subject))  # raises for an axis that the case does not have
    return terms


@ask_subject("deviations")
def deviations(case: CaseLike, subject: Subject) -> Mapping[str, float]:
    """The standard deviation of initial values by parameter, 0 for a constant; empty if the subject states none.

    Raises Unanswered if they cannot be read, also in place of the TypeError of anything but such a mapping.
    """
    stating: Callable[[CaseLike], Any] | None = getattr(subject, "deviations", None)
    by_name = {} if stating is None else stating(case)
    if not isinstance(by_name, Mapping) or any(not isinstance(x, int | float) or x < 0 for x in by_name.values()):
        raise TypeError(f"deviations={by_name!r} must map parameters to numbers; legal: {{'up.weight': 0.02}}")
    return {str(name): float(one) for name, one in by_name.items()}


def _complete(term: object) -> Term:
    """A term of another class, whose fields must all be stated. Raises TypeError if one is not."""
    for field, kind in _TERM.items():
        if not isinstance(getattr(term, field, None), kind):
            what = f"{type(term).__name__} has no {field} of type {kind.__name__}, so it is no term"
            raise TypeError(f"{what}; a term has {', '.join(_TERM)}; a shardproof.Term may leave some out")
    complete = Term(**{field: getattr(term, field) for field in _TERM})
    return replace(complete, hidden=bool(getattr(term, "hidden", False)), at=dict(getattr(term, "at", {})))


@ask_subject("axes")
def orders(case: CaseLike, subject: Subject) -> Axes:
    """The rank lists that the subject states for axes of its own rank order, empty if it states none.

    Raises Unanswered in place of the TypeError of what is no mapping, and for an axis whose lists do not hold every
    rank of the case's world once, in groups of the case's size.
    """
    stating: Callable[[CaseLike], Any] | None = getattr(subject, "axes", None)
    rank_lists = None if stating is None else stating(case)
    if rank_lists is None:
        return {}
    if not isinstance(rank_lists, Mapping):
        raise TypeError(f"axes={rank_lists!r} must map axes to rank lists; legal: {{'tp': ((0, 1), (2, 3))}}")
    return {str(axis): _lists(str(axis), lists, case) for axis, lists in rank_lists.items()}


def named_axes(case: CaseLike, subject: Subject) -> Axes:
    """The axes by which groups of a run are named: the case's, and the subject's own if these are valid."""
    try:
        return {**case.axes, **orders(case, subject)}
    except Unanswered:  # the check of groups reports it
        return case.axes


def _lists(axis: str, rank_lists: Any, case: CaseLike) -> tuple[tuple[int, ...], ...]:
    """The rank lists of one axis. Raises ValueError unless they hold every rank once, in groups of the case's size."""
    own, world = case.axes.get(axis, ()), list(range(case.world_size))
    legal = own or (tuple(world),)
    try:
        lists = tuple(tuple(int(rank) for rank in ranks) for ranks in rank_lists)
    except TypeError:
        lists = ()
    if sorted(rank for ranks in lists for rank in ranks) != world:
        rule = f"every rank of {len(world)} must be in one rank list"
        raise ValueError(f"axis {axis}={rank_lists!r}: {rule}; legal: {legal}")
    if own and {len(ranks) for ranks in lists} != {len(ranks) for ranks in own}:
        raise ValueError(f"axis {axis}={rank_lists!r}: the case has groups of {len(own[0])} ranks; legal: {legal}")
    return lists
