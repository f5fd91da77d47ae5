"""Terms: the lines of a closed form, and which events each of them counts.

A term counts the events of a rank, over the whole run, that match every field it states; a field left out (None)
matches anything. The term holds for every rank, or for those at its coordinates of the mesh (`at`). A term that states
every field is complete: a ledger of complete terms is compared as an exact multiset of `EventKey`s. Terms that differ
in their numbers alone (calls, total_bytes) add up. Payloads are bytes.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter

from shardproof.harness.ledger import OPS, PHASES, REDUCE_OPS, Event
from shardproof.harness.protocols import Axes, TermLike


@dataclass(frozen=True, slots=True, kw_only=True)
class EventKey:
    """Compared fields of an event: the fields that a complete term states."""

    phase: str
    region: str
    op: str
    reduce_op: str
    axis: str
    group_size: int
    dtype: str
    payload_bytes: int

    @property
    def site(self) -> tuple[str, str, str]:
        """Phase, region and op."""
        return self.phase, self.region, self.op

    @property
    def place(self) -> str:
        """Phase and region in words: "forward of head"."""
        return f"{self.phase} of {self.region or 'no module'}"

    def __str__(self) -> str:
        op = f"{self.op} {self.reduce_op}".strip()
        return f"{op} of {self.payload_bytes} B {self.dtype} over {self.axis} ({self.group_size} ranks)"


FIELDS = tuple(field.name for field in fields(EventKey))
_FIELDS = attrgetter(*FIELDS)
_NUMBERS = {"group_size": 1, "payload_bytes": 0, "calls": 0, "total_bytes": 0}
"""Fields that are integers -> the smallest value."""
CARRIERS = ("c10d", "user_buffer", "deep_ep", "replay")
"""Carriers of a call: torch.distributed, the only one that a recorder sees; copies between user buffers inside of a
product (TransformerEngine's tp_comm_overlap); DeepEP's kernels; replays of CUDA graphs that C++ launches.
"""
_WORDS = {"phase": PHASES, "op": OPS, "reduce_op": REDUCE_OPS, "carrier": CARRIERS}
"""Fields with a fixed list of legal words."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Term:
    """Calls that every rank issues over the whole run; fields as in the ledger, None for any value.

    `at` maps mesh axes to coordinates: the term holds for the ranks at these alone, such as those of one pipeline
    stage. Without any it holds for every rank. `payload_bytes` is that of each call, `total_bytes` the sum over all
    calls; `calls` None: any number of them. `hidden`: a product is computed between the issue and the wait of each
    call. `carrier`: one of CARRIERS; calls that no recorder sees are reported as not checked, and are never missing.
    Raises ValueError or TypeError for a field that no call can have, and if nothing is stated.
    """

    phase: str | None = None
    region: str | None = None
    op: str | None = None
    reduce_op: str | None = None
    axis: str | None = None
    group_size: int | None = None
    dtype: str | None = None
    payload_bytes: int | None = None
    calls: int | None = None
    total_bytes: int | None = None
    hidden: bool = False
    carrier: str = CARRIERS[0]
    at: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in (*self.stated, "carrier"):
            self._check(name)
        if not self.stated:
            raise ValueError("Term(): states nothing; legal: Term(op='all_reduce', axis='tp', calls=2)")
        if self.payload_bytes is not None and self.total_bytes is not None:
            rule = "state one of the two: of each call, or of all calls together"
            raise ValueError(f"payload_bytes={self.payload_bytes}, total_bytes={self.total_bytes}: {rule}")
        for axis, place in self.at.items():
            if type(place) is not int or place < 0:
                legal = {axis: 0}
                raise ValueError(f"at={dict(self.at)}: places on {axis} are whole numbers from 0; legal: {legal}")

    def _check(self, name: str) -> None:
        value = getattr(self, name)
        if name in _NUMBERS:
            if type(value) is not int or value < _NUMBERS[name]:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least {_NUMBERS[name]}")
        elif not isinstance(value, str):
            raise TypeError(f"{name}={value!r}: must be a word, not {type(value).__name__}; leave it out for any")
        elif value not in _WORDS.get(name, (value,)):
            legal = ", ".join(map(repr, _WORDS[name]))
            raise ValueError(f"{name}={value!r}: is no word of the ledger; legal: {legal}")

    @property
    def stated(self) -> tuple[str, ...]:
        """The names of the stated fields, without `hidden`."""
        return tuple(name for name in (*FIELDS, "calls", "total_bytes") if getattr(self, name) is not None)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Fields that this term does not compare. A sum of bytes stands for those of each call."""
        names = [name for name in (*FIELDS, "calls") if getattr(self, name) is None]
        return tuple(name for name in names if name != "payload_bytes" or self.total_bytes is None)

    def matches(self, line: EventKey | Event) -> bool:
        """Whether this event has every value that is stated."""
        return all((value := getattr(self, name)) is None or value == getattr(line, name) for name in FIELDS)

    def times(self, count: int) -> "Term":
        """These calls and bytes `count` times."""
        calls = None if self.calls is None else self.calls * count
        return replace(self, calls=calls, total_bytes=None if self.total_bytes is None else self.total_bytes * count)

    def __repr__(self) -> str:
        """The call of this term, without the fields that it leaves out."""
        words = [f"{name}={json.dumps(getattr(self, name))}" for name in self.stated]
        words += [f"carrier={json.dumps(self.carrier)}"] if self.carrier != CARRIERS[0] else []
        words += [f"at={json.dumps(dict(self.at))}"] if self.at else []
        return f"Term({', '.join([*words, *(['hidden=True'] if self.hidden else [])])})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """Terms, with equal ones added up: the calls of complete ones by their keys, and the other terms."""

    complete: Counter[EventKey]
    partial: tuple[Term, ...]

    def find_counting_terms(self, line: EventKey) -> list[EventKey | Term]:
        """Keys and terms that count this event: its own key if a complete term states it, and partial terms."""
        own: list[EventKey | Term] = [line] if line in self.complete else []
        return own + [term for term in self.partial if term.matches(line)]


def select_visible_terms(terms: Iterable[TermLike]) -> list[TermLike]:
    """The terms whose calls a recorder sees."""
    return [term for term in terms if not select_unseen_terms([term])]


def select_unseen_terms(terms: Iterable[TermLike]) -> list[Term]:
    """The terms whose calls no recorder sees."""
    return [term for term in terms if isinstance(term, Term) and term.carrier != CARRIERS[0]]


def closed_forms(terms: Iterable[TermLike], ranks: Iterable[int], axes: Axes) -> dict[int, ClosedForm]:
    """The closed form of each of these ranks: the terms that hold at its coordinates.

    Raises ValueError for a term at an axis that does not exist.
    """
    made: dict[tuple[bool, ...], ClosedForm] = {}
    every, found = tuple(terms), {}
    for rank in ranks:
        own = {axis: {group.index(rank) for group in groups if rank in group} for axis, groups in axes.items()}
        holds = tuple(_holds(getattr(term, "at", {}), own) for term in every)
        if holds not in made:
            made[holds] = closed_form(term for term, here in zip(every, holds, strict=True) if here)
        found[rank] = made[holds]
    return found


def as_stated(events: Iterable[Event], terms: Iterable[TermLike], ranks: Iterable[int], axes: Axes) -> bool:
    """Whether these ranks issued exactly the calls of these terms, and each of these states every field."""
    lines: dict[int, Counter[EventKey]] = {rank: Counter() for rank in ranks}
    for event in events:
        lines.setdefault(event.rank, Counter())[key_of(event)] += 1
    forms = closed_forms(terms, lines, axes)
    return all(not forms[rank].partial and forms[rank].complete == own for rank, own in lines.items())


def _holds(at: Mapping[str, int], own: Mapping[str, set[int]]) -> bool:
    """Whether a rank with these coordinates is one of those for which a term holds."""
    for axis, place in at.items():
        if axis not in own:
            raise ValueError(f"at={dict(at)}: {axis} is no axis of the case's mesh; legal: {', '.join(own) or 'none'}")
        if place not in own[axis]:
            return False
    return True


def closed_form(terms: Iterable[TermLike]) -> ClosedForm:
    """The closed form of one rank from its terms."""
    complete: Counter[EventKey] = Counter()
    partial: dict[tuple[object, ...], Term] = {}
    for term in terms:
        if isinstance(term, Term) and not {*FIELDS, "calls"}.issubset(term.stated):
            pattern = tuple(getattr(term, name) for name in FIELDS)
            partial[pattern] = _add_terms(partial[pattern], term) if pattern in partial else term
        else:
            complete[key_of(term)] += term.calls or 0
    return ClosedForm(complete=complete, partial=tuple(partial.values()))


def _add_terms(one: Term, other: Term) -> Term:
    """Both as one term. A number that only one of them states is that of both."""

    def both(mine: int | None, theirs: int | None) -> int | None:
        return theirs if mine is None else mine if theirs is None else mine + theirs

    calls, total = both(one.calls, other.calls), both(one.total_bytes, other.total_bytes)
    return replace(one, calls=calls, total_bytes=total, hidden=one.hidden or other.hidden)


def key_of(entry: Event | TermLike) -> EventKey:
    """Key of an event, or of each event of a complete term."""
    return EventKey(**dict(zip(FIELDS, _FIELDS(entry), strict=True)))
