"""Compares a ledger with a closed form: the exact multiset of events on every rank, and where the two first differ.

Two events are equal if their keys are: phase, region, op, reduce op, axis, group size, dtype and payload bytes. An
extra event and a missing one at the same place become one "wrong" event. A term that leaves fields out counts the
events that match it; an event that no term counts is extra. Differences are sorted in the order of training: by phase,
then by module, in reverse for backward. Payloads are bytes; calls count over the whole run of one rank.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType

from shardproof.harness.ledger import BACKWARD, Event, order_of_phase
from shardproof.harness.protocols import Axes, TermLike
from shardproof.harness.terms import FIELDS, EventKey, Term, closed_forms, key_of, select_visible_terms

_Pass = tuple[int, int]
"""Step and micro-batch."""
_LISTED = 3
"""The most places of counted events that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key on which ledger and closed form differ: `expected` or `found` is None if the event is extra or missing.

    `calls`: by how many events they differ on each of `ranks`, 0 if only their bytes do; `caller`: where the found
    event was issued. `term` is a term with fields left out that does not hold, and what was found. Then the key has
    only what the counted events have in common, unless one event stands for another.
    """

    expected: EventKey | None
    found: EventKey | None
    calls: int
    ranks: tuple[int, ...]
    caller: str = ""
    term: str = ""
    misses_first: bool = False

    @property
    def line(self) -> EventKey:
        """The found event, or the missing one: that of the earlier place."""
        line = self.expected if self.misses_first else self.found or self.expected
        assert line is not None  # a difference has at least one side
        return line

    @property
    def kind(self) -> str:
        """missing, extra or wrong."""
        return "missing" if self.found is None else "extra" if self.expected is None else "wrong"

    @property
    def counted(self) -> bool:
        """Whether a term counts other numbers than it states, and no single event is known to be wrong."""
        return bool(self.term) and (self.kind != "wrong" or self.expected == self.found)


def find_differences(
    events: Iterable[Event],
    terms: Iterable[TermLike],
    ranks: Iterable[int],
    order: Sequence[str] = (),
    *,
    axes: Axes = MappingProxyType({}),
) -> list[Difference]:
    """Where the ledger differs from the expectation on any of these ranks, in the order of training.

    `order` are the modules in the order of forward, `axes` those of the case, for terms that hold at some ranks alone.
    """
    found: dict[int, Counter[EventKey]] = {rank: Counter() for rank in ranks}
    callers: dict[EventKey, str] = {}
    passes: dict[str, Counter[tuple[EventKey, _Pass]]] = {}
    for event in events:
        line = key_of(event)
        passes.setdefault(event.phase, Counter())[line, (event.step, event.microbatch)] += 1
        found.setdefault(event.rank, Counter())[line] += 1
        callers.setdefault(line, event.caller)
    parted: dict[Difference, list[int]] = {}
    forms = closed_forms(select_visible_terms(terms), found, axes)
    for rank, lines in found.items():
        form = forms[rank]
        surplus = lines - form.complete
        if form.partial:
            for line in [line for line in surplus if line not in form.complete and form.find_counting_terms(line)]:
                del surplus[line]
        parts = _pair_lines(surplus, form.complete - lines, callers)
        for term in form.partial:
            parts = _count_term(parts, term, lines, callers)
        for difference in parts:
            parted.setdefault(difference, []).append(rank)
    places = {module: place for place, module in enumerate(order)}
    joined = [
        replace(difference, ranks=tuple(who), misses_first=_misses_first(difference, places, passes))
        for difference, who in parted.items()
    ]
    return sorted(joined, key=lambda difference: _order_of_line(difference.line, places))


def _misses_first(
    parted: Difference, places: Mapping[str, int], passes: Mapping[str, Counter[tuple[EventKey, _Pass]]]
) -> bool:
    """Whether the place that lacks a call comes before the place where it is made.

    If the first pass of that phase has more of these calls than another pass, a later one lacks them.
    """
    if parted.found is None or parted.expected is None:
        return False
    if _order_of_line(parted.expected, places) >= _order_of_line(parted.found, places):
        return False
    made = passes.get(parted.expected.phase, Counter())
    counts = [made[parted.expected, at] for at in sorted({at for _, at in made})]
    return not counts or counts[0] == min(counts)


def but_for_bytes(parted: Sequence[Difference], regions: Collection[str]) -> list[Difference]:
    """These differences, without calls of these modules of which some differ in their payload alone.

    If rows were routed in another way, a call has other rows, or is not made for want of rows.
    """

    def call(key: EventKey) -> EventKey:
        return replace(key, payload_bytes=0)

    there = [one for one in parted if one.line.region in regions]
    other_rows = {call(x.found) for x in there if x.found and x.expected and call(x.found) == call(x.expected)}
    return [one for one in parted if {call(key) for key in (one.found, one.expected) if key} - other_rows]


def _pair_lines(
    surplus: Counter[EventKey], lack: Counter[EventKey], callers: Mapping[EventKey, str]
) -> list[Difference]:
    """Extra and missing events of one rank, joined where one stands for the other: the most similar ones first.

    Such a pair is a call of one place made in another way, the call of one module in another phase, or the same call
    somewhere else.
    """
    parts = []
    for same in (attrgetter("site"), attrgetter("place"), _region_and_call, str):
        for missing in list(lack):
            match = next((line for line in surplus if same(line) == same(missing) and surplus[line] > 0), None)
            if match is None:
                continue
            calls = min(surplus[match], lack[missing])
            parts.append(Difference(expected=missing, found=match, calls=calls, ranks=(), caller=callers[match]))
            surplus, lack = surplus - Counter({match: calls}), lack - Counter({missing: calls})
    parts += [Difference(expected=None, found=x, calls=n, ranks=(), caller=callers[x]) for x, n in surplus.items()]
    parts += [Difference(expected=x, found=None, calls=n, ranks=()) for x, n in lack.items()]
    return parts


def _region_and_call(line: EventKey) -> tuple[str, str]:
    return line.region, str(line)


def _count_term(
    parts: Sequence[Difference], term: Term, lines: Counter[EventKey], callers: Mapping[EventKey, str]
) -> list[Difference]:
    """The differences of one rank from what this term counts there. Extra events stand for those that are missing."""
    matched = Counter({line: calls for line, calls in lines.items() if term.matches(line)})
    calls, total = matched.total(), sum(line.payload_bytes * calls for line, calls in matched.items())
    lack = 0 if term.calls is None else term.calls - calls
    if not lack and term.total_bytes in (None, total):
        return list(parts)
    found = f"{calls} call{'s' if calls > 1 else ''}, {total} B" if calls else "none"
    kept, wrong = list(parts), []
    while lack > 0 and (extra := _find_substitute(kept, term)):
        assert extra.found is not None  # it is an extra event
        legal = replace(extra.found, **{name: getattr(term, name) for name in term.stated if name in FIELDS})
        taken = min(lack, extra.calls)
        wrong.append(replace(extra, expected=legal, calls=taken, term=f"{term}, found {found}"))
        kept.remove(extra)
        kept += [replace(extra, calls=extra.calls - taken)] if extra.calls > taken else []
        lack -= taken
    if wrong and not lack:
        return kept + wrong
    line = _common_fields(term, matched)
    return [
        *kept,
        *wrong,
        Difference(
            expected=line if lack >= 0 else None,
            found=line if lack <= 0 else None,
            calls=abs(lack),
            ranks=(),
            term=f"{term}, found {found}{_places_of_calls(matched, callers)}",
        ),
    ]


def _find_substitute(parts: Iterable[Difference], term: Term) -> Difference | None:
    """The extra event most similar to those that this term counts; None if none has a field in common with them."""

    def alike(part: Difference) -> int:
        return sum(getattr(term, name) == getattr(part.line, name) for name in FIELDS if name in term.stated)

    extra = [part for part in parts if part.kind == "extra" and not part.term]
    return max(filter(alike, extra), key=alike, default=None)


def _common_fields(term: Term, matched: Iterable[EventKey]) -> EventKey:
    """The fields that these events have in common, or those that the term states; "" and 0 for the rest."""
    shared = {name: {getattr(line, name) for line in matched} for name in FIELDS}
    known = {name: values.pop() for name, values in shared.items() if len(values) == 1}
    blank = EventKey(phase="", region="", op="", reduce_op="", axis="", group_size=0, dtype="", payload_bytes=0)
    return replace(blank, **known, **{n: getattr(term, n) for n in term.stated if n in FIELDS and n not in known})


def _places_of_calls(matched: Counter[EventKey], callers: Mapping[EventKey, str]) -> str:
    """Where the first of these calls were issued; "" if there are none."""
    by_place: Counter[str] = Counter()
    for line, calls in matched.items():
        by_place[line.place + (f" at {callers[line]}" if callers[line] else "")] += calls
    places = [f"{calls} in {place}" for place, calls in by_place.items()]
    more = f", and at {len(places) - _LISTED} more places" if len(places) > _LISTED else ""
    return f": {', '.join(places[:_LISTED])}{more}" if places else ""


def _order_of_line(line: EventKey, places: Mapping[str, int]) -> tuple[int, int]:
    """Sort key: phase, then module. Backward phases have the modules in reverse."""
    last = len(places)
    place = places.get(line.region, last)
    backwards = line.phase in BACKWARD
    return order_of_phase(line.phase), -place if backwards and place < last else place
