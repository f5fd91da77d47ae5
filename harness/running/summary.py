"""The ledger of one case, summed up beside its expectation: calls and bytes of one rank by phase, op and axis.

A row holds the maximum over ranks; its `min_*` fields hold the minimum if ranks differ, else None. `ranks_apart` is the
number of ranks whose calls or bytes differ from those expected of them. All counts are over the whole run of the case;
payload and wire in bytes. `expected_*` and `ranks_apart` are None without an expectation, and if its terms do not state
what the row needs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from types import MappingProxyType

from shardproof.harness.ledger import OPS, PHASES, Event
from shardproof.harness.protocols import Axes, TermLike
from shardproof.harness.terms import FIELDS, Term, closed_forms, select_visible_terms

COUNTS = ("calls", "payload_bytes", "wire_bytes")
SUMMARY_COLUMNS = (
    *("case", "mode", "phase", "op", "axis", "group_size"),
    *COUNTS,
    *("expected_calls", "expected_payload_bytes"),
    *(f"min_{name}" for name in COUNTS),
    "ranks_apart",
)
"""Columns of `summary.csv`; the `min_` ones are empty if ranks do not differ."""

_Key = tuple[str, str, str, int]
"""phase, op, axis, group size."""
_KEY = attrgetter("phase", "op", "axis", "group_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """A row of `summary.csv`."""

    case: str
    mode: str
    phase: str
    op: str
    axis: str
    group_size: int
    calls: int
    payload_bytes: int
    wire_bytes: int
    expected_calls: int | None
    expected_payload_bytes: int | None
    min_calls: int | None = None
    min_payload_bytes: int | None = None
    min_wire_bytes: int | None = None
    ranks_apart: int | None = None


def summarize(
    case: str,
    mode: str,
    world_size: int,
    events: Iterable[Event],
    expectation: Sequence[TermLike] | None,
    ran: Sequence[int] = (),
    axes: Axes = MappingProxyType({}),
) -> list[SummaryRow]:
    """The rows of one case, in the order of phases and ops; `ran` are the ranks that were run, if not all were.

    The expected numbers are the largest of all ranks. `axes` are the case's, for terms that hold at some coordinates
    alone.
    """
    places = {rank: place for place, rank in enumerate(ran or range(world_size))}
    counts: dict[_Key, list[list[int]]] = {}
    for event in events:
        key = (event.phase, event.op, event.axis, event.group_size)
        of_rank = counts.setdefault(key, [[0, 0, 0] for _ in places])[places[event.rank]]
        for place, amount in enumerate((1, event.payload_bytes, event.wire_bytes)):
            of_rank[place] += amount
    forms = closed_forms(select_visible_terms(expectation or ()), places, axes)
    lines = {
        id(form): [*(Term(**asdict(line), calls=calls) for line, calls in form.complete.items()), *form.partial]
        for form in forms.values()
    }
    alike = Counter(key[:3] for key in counts)
    rows = []
    expected = {_KEY(term) for terms in lines.values() for term in terms if None not in _KEY(term)}
    for key in sorted(expected.union(counts), key=_order):
        by_rank = counts.get(key, [[0, 0, 0] for _ in places])
        due = {form: _expected_traffic(key, terms, alone=alike[key[:3]] < 2) for form, terms in lines.items()}
        stated = None if expectation is None else [due[id(forms[rank])] for rank in places]
        rows.append(_row(case, mode, key, by_rank, stated))
    return rows


def _of_known(pick: Callable[[list[int]], int], numbers: Sequence[int | None]) -> int | None:
    """The sum, or the largest, of these numbers; None if one of them is not known."""
    known = [number for number in numbers if number is not None]
    return pick(known) if len(known) == len(numbers) else None


def _expected_traffic(key: _Key, terms: Iterable[Term], *, alone: bool) -> tuple[int | None, int | None]:
    """The calls and bytes that a row must have; None for those that do not follow from its terms.

    Terms that state the same fields count different events, so they add up. Terms that state different fields may count
    an event twice, so nothing follows. `alone`: no other row has its phase, op and axis, so terms need not state the
    size of the group.
    """
    own = [term for term in terms if all(mine in (None, its) for mine, its in zip(_KEY(term), key, strict=True))]
    fields = {tuple(name for name in term.stated if name in FIELDS) for term in own}
    if len(fields) > 1 or any(None in _KEY(term)[: 3 if alone else 4] for term in own):
        return None, None
    size = [
        term.total_bytes if term.payload_bytes is None or term.calls is None else term.calls * term.payload_bytes
        for term in own
    ]
    return _of_known(sum, [term.calls for term in own]), _of_known(sum, size)


def _row(
    case: str,
    mode: str,
    key: _Key,
    by_rank: Sequence[Sequence[int]],
    stated: Sequence[tuple[int | None, int | None]] | None,
) -> SummaryRow:
    """A row of calls, payload and wire bytes by rank, beside the calls and payload bytes that are
    stated for each rank.
    """
    phase, op, axis, group_size = key
    most, least = ([pick(column) for column in zip(*by_rank, strict=True)] for pick in (max, min))
    calls, size = (None, None) if stated is None else (_of_known(max, numbers) for numbers in zip(*stated, strict=True))
    apart = None
    if stated is not None and calls is not None and size is not None:
        apart = sum(tuple(mine[:2]) != due for mine, due in zip(by_rank, stated, strict=True))
    return SummaryRow(
        case=case,
        mode=mode,
        phase=phase,
        op=op,
        axis=axis,
        group_size=group_size,
        **dict(zip(COUNTS, most, strict=True)),
        expected_calls=calls,
        expected_payload_bytes=size,
        **({f"min_{name}": number for name, number in zip(COUNTS, least, strict=True)} if most != least else {}),
        ranks_apart=apart,
    )


def _order(key: _Key) -> tuple[int, int, str, int]:
    phase, op, axis, group_size = key
    place = PHASES.index(phase) if phase in PHASES else len(PHASES)
    return place, OPS.index(op) if op in OPS else len(OPS), axis, group_size
