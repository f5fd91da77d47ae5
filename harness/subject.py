"""What a subject provides: its program on a rank, and its optional attributes, each read in one place.

    itself                  a callable, by its name or as it is         `named`, `called`
    modes, unchecked        what it claims and what it leaves out       `claims`, `claimed`, `left_out`
    refuses                 cases that it does not support              `refusal`
    expected                its closed form of a case                   `stated`
    axes                    rank lists of its own rank order            `orders`, `named_axes`
    activations, harmless   asked where they are used, by `answered` and `offers`

All of it is the subject's own code: whatever it raises, or leaves with, becomes one sentence (Unanswered). The harness
knows no modes: which there are is read from the case's own list, by name. `harness.protocols.Subject` states the types.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from harness.cases import check_modes, known_modes
from harness.differences import EventKey
from harness.errors import RequestError, error_text
from harness.protocols import Axes, CaseLike, Subject, TermLike, Value
from harness.resolve import resolve

if TYPE_CHECKING:
    import torch

__all__ = [
    "Claims",
    "NamedSubject",
    "Unanswered",
    "answered",
    "called",
    "claimed",
    "claims",
    "left_out",
    "named",
    "named_axes",
    "offers",
    "orders",
    "refusal",
    "stated",
]

T = TypeVar("T")
LEFT = "left with status 0 (sys.exit) and returned nothing"

_TERM: Mapping[str, type] = {**get_type_hints(EventKey), "calls": int}


class Unanswered(RequestError):
    """The subject's own words about itself failed; the message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSubject:
    """A subject and its `name` in messages. `address`, module:object, is where other processes import it; "" for one
    that was given as an object.
    """

    name: str
    call: Subject
    address: str = ""

    @property
    def sent(self) -> str | Subject:
        """What another process gets: the address, else the object itself."""
        return self.address or self.call

    def __reduce__(self) -> tuple[object, ...]:
        return named, (self.sent,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """`modes` can be asked for, in the subject's order; `unknown` ones no case can have."""

    subject: str
    modes: tuple[str, ...]
    unknown: tuple[str, ...] = ()

    def chosen(self, text: str) -> tuple[str, ...]:
        """Those that an option names, comma separated, or "all". Raises RequestError for any other."""
        if text == "all":
            return self.modes
        check_modes(text)
        named = tuple(dict.fromkeys(text.split(",")))
        if other := [mode for mode in named if mode not in self.modes]:
            claimed = ", ".join((*self.modes, *self.unknown))
            raise RequestError(f"modes={','.join(other)}: {self.subject} claims {claimed}; legal: --modes all")
        return named


def named(subject: str | Subject | NamedSubject) -> NamedSubject:
    """The subject of this address, or this object under the name that resolves to it.

    Raises RequestError when there is none, or when it cannot be called.
    """
    if isinstance(subject, NamedSubject):
        return subject
    address = subject if isinstance(subject, str) else ""
    found: Any = resolve(address) if address else subject
    name = address or _name_of(found)
    if not callable(found):
        raise RequestError(f"subject {name}: must be callable as subject(case, device), not {type(found).__name__}")
    return NamedSubject(name=name, call=found, address=address)


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


def refusal(case: CaseLike, subject: NamedSubject) -> str:
    """Why the subject does not take this case, "" when it does. Raises RequestError when its own words fail."""
    modes = claimed(subject)
    if modes is not None and case.mode not in modes:
        return f"{subject.name} claims the modes {', '.join(modes) or 'none'}, not {case.mode}"
    asked: Any = subject.call
    return answered("refuses", lambda: str(asked.refuses(case) or "")) if offers(asked, "refuses") else ""


def claims(subject: NamedSubject) -> Claims:
    """What this subject claims; all modes when it says nothing. Raises RequestError for what is no tuple of words, or
    when no case can have any of them.
    """
    known = known_modes()
    said = claimed(subject)
    if said is None:
        return Claims(subject=subject.name, modes=known)
    words = tuple(dict.fromkeys(said))
    modes = tuple(mode for mode in words if mode in known)
    if not modes:
        rule = "names no mode that a case can have"
        raise RequestError(f"subject={subject.name}: modes={tuple(said)!r} {rule}; legal: {'|'.join(known)}")
    return Claims(subject=subject.name, modes=modes, unknown=tuple(mode for mode in words if mode not in known))


def claimed(subject: NamedSubject) -> tuple[str, ...] | None:
    """The words of the attribute `modes`, None without it. Raises RequestError for what is no tuple of words."""
    return _words(subject, "modes", "('tp',)")


def left_out(subject: NamedSubject) -> tuple[str, ...]:
    """The patterns of names in the attribute `unchecked`, () without it. Raises RequestError for what is no tuple of
    words.
    """
    return _words(subject, "unchecked", "('grad/*.bias',)") or ()


def _words(subject: NamedSubject, attribute: str, legal: str) -> tuple[str, ...] | None:
    said = answered(attribute, lambda: getattr(subject.call, attribute, None))
    if said is None:
        return None
    if not isinstance(said, tuple | list) or not all(isinstance(word, str) for word in said):
        rule = f"{attribute}={said!r} must be a tuple of words; legal: {attribute} = {legal}"
        raise RequestError(f"subject={subject.name}: {rule}")
    return tuple(said)
