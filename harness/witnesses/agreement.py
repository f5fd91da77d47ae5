"""Compares the witnesses event by event: op, group, payload bytes, phase and order, with the ledger in the middle.

Other witnesses are put in order of issue and compared one by one. If one of them misses or invents an event, the rest
is aligned again, so that a single difference is reported once. The closed form has no order: every recorded event uses
up one of its terms, and what is left over is missing. A field that a witness cannot know is open: no `groups` or
several, payload_bytes UNKNOWN, phase or region "", step -1. Of several groups one must be the ledger's; other open
fields are not compared. `open_fields` counts groups, payloads and phases. Times are microseconds on the witness's own
clock.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import Any

from shardproof.harness.ledger import Event
from shardproof.harness.protocols import Axes, TermLike
from shardproof.harness.terms import ClosedForm, EventKey, Term, closed_forms, key_of, select_visible_terms
from shardproof.harness.traces.calls import TracedCall

UNKNOWN = -1
"""Bytes that a witness does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A collective on one rank as a witness saw it; `index` is its number among the rank's
    sightings in order of issue.
    """

    rank: int
    index: int
    op: str
    groups: tuple[tuple[int, ...], ...] = ()
    payload_bytes: int = UNKNOWN
    phase: str = ""
    region: str = ""
    step: int = -1
    start_us: float = 0.0
    duration_us: float = 0.0


def sighting_of(call: TracedCall, rank: int, index: int, **known: Any) -> Sighting:
    """A call of a trace as a witness saw it; `known` has fields that other sources know better."""
    facts: dict[str, Any] = {
        "groups": (tuple(sorted(call.group)),) if call.group else (),
        "payload_bytes": UNKNOWN if call.payload_bytes is None else call.payload_bytes,
        "start_us": call.start_us or 0.0,
        "duration_us": call.host_us or 0.0,
    }
    return Sighting(rank=rank, index=index, op=call.op, phase=call.phase, **facts | known)


def of_ledger(events: Iterable[Event]) -> list[Sighting]:
    """The recorder's own sightings, by rank and order of issue."""
    same = ("rank", "op", "payload_bytes", "phase", "region", "step", "start_us", "duration_us")
    counts: Counter[int] = Counter()
    seen = []
    for event in sorted(events, key=lambda event: (event.rank, event.call_index)):
        facts = {name: getattr(event, name) for name in same}
        seen.append(Sighting(index=counts[event.rank], groups=(tuple(sorted(event.group)),), **facts))
        counts[event.rank] += 1
    return seen


def in_words(seen: Sighting) -> str:
    """ "backward all_reduce of 512 B over 0,1", with "?" for what the witness does not know."""
    payload = "?" if seen.payload_bytes == UNKNOWN else str(seen.payload_bytes)
    return f"{seen.phase or '?'} {seen.op} of {payload} B over {group_text(seen)}"


def group_text(seen: Sighting) -> str:
    """The ranks of the group, "0,1"; several if it is one of them, "?" if it is unknown."""
    return " or ".join(",".join(map(str, group)) for group in seen.groups[:3]) or "?"


AGREES, MISSING, NOT_ASKED = "=", "missing", "-"
CLOSED_FORM = "closed_form"
_Left = tuple[int | None, int | None]
"""Calls and bytes that no event has used up, None if none are stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An event side by side: what the ledger has (None when only others did), and every other witness's word on it.

    A word is AGREES, MISSING, NOT_ASKED, or what that witness saw instead.
    """

    rank: int
    index: int
    recorded: Sighting | None
    words: Mapping[str, str]

    @property
    def agrees(self) -> bool:
        """Whether no witness contradicts."""
        return self.recorded is not None and set(self.words.values()) <= {AGREES, NOT_ASKED}

    def __str__(self) -> str:
        seen = in_words(self.recorded) if self.recorded else "nothing"
        place = f" in {self.recorded.region}" if self.recorded and self.recorded.region else ""
        others = ", ".join(
            f"{witness} saw {'nothing' if word == MISSING else word}"
            for witness, word in self.words.items()
            if word not in (AGREES, NOT_ASKED)
        )
        return f"event {self.index} of rank {self.rank}: the ledger has {seen}{place}; {others}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """All rows by rank and order, and how many fields each witness left open."""

    witnesses: tuple[str, ...]
    rows: tuple[Row, ...]
    open_fields: Mapping[str, int]

    @property
    def broken(self) -> tuple[Row, ...]:
        """The rows in which a witness contradicts the ledger, in order of issue."""
        return tuple(sorted((row for row in self.rows if not row.agrees), key=lambda row: (row.index, row.rank)))


def agreement(
    recorded: Sequence[Sighting],
    others: Mapping[str, Sequence[Sighting]],
    events: Sequence[Event] = (),
    terms: Iterable[TermLike] | None = None,
    axes: Axes = MappingProxyType({}),
) -> Agreement:
    """Compare every witness's sightings with the recorder's, and `events` (those of `recorded`) with the terms.

    Some terms may hold for ranks at some coordinates of `axes` alone.
    """
    ranks = sorted({seen.rank for seen in recorded}.union(*({s.rank for s in seen} for seen in others.values())))
    words: dict[tuple[int, int], dict[str, str]] = {}
    extra: list[Row] = []
    for witness, seen in others.items():
        for rank in ranks:
            mine, theirs = _of(rank, recorded), _of(rank, seen)
            for index, word in _differences(mine, theirs):
                if index < len(mine):
                    words.setdefault((rank, index), {})[witness] = word
                else:
                    extra.append(Row(rank=rank, index=len(mine), recorded=None, words={witness: word}))
    if terms is not None:
        covered, extra_terms = _cover_events(recorded, events, closed_forms(select_visible_terms(terms), ranks, axes))
        for key, word in covered.items():
            words.setdefault(key, {})[CLOSED_FORM] = word
        extra += extra_terms
    rows = [
        Row(rank=seen.rank, index=seen.index, recorded=seen, words=words.get((seen.rank, seen.index), {}))
        for seen in recorded
    ]
    return Agreement(
        witnesses=(*others, *(() if terms is None else (CLOSED_FORM,))),
        rows=tuple(sorted([*rows, *extra], key=lambda row: (row.rank, row.index))),
        open_fields={witness: sum(map(_count_open_fields, seen)) for witness, seen in others.items()},
    )


def _of(rank: int, seen: Sequence[Sighting]) -> list[Sighting]:
    return sorted((s for s in seen if s.rank == rank), key=lambda s: s.index)


def _differences(mine: Sequence[Sighting], theirs: Sequence[Sighting]) -> list[tuple[int, str]]:
    """The witness's word on each of the recorder's events; an index past the end is an event it saw alone."""
    if len(mine) == len(theirs):
        return [(i, _word(one, other)) for i, (one, other) in enumerate(zip(mine, theirs, strict=True))]
    differences: list[tuple[int, str]] = []
    whole = not any(map(_count_open_fields, theirs))
    ours, other = (
        [(s.op, s.payload_bytes, *((s.phase, s.groups) if whole else ())) for s in seen] for seen in (mine, theirs)
    )
    for _tag, start, end, from_, to in SequenceMatcher(None, ours, other, autojunk=False).get_opcodes():
        for i, j in zip(range(start, end), range(from_, to), strict=False):
            differences.append((i, _word(mine[i], theirs[j])))
        shared = min(end - start, to - from_)
        differences += [(i, MISSING) for i in range(start + shared, end)]
        differences += [(len(mine), in_words(theirs[j])) for j in range(from_ + shared, to)]
    return differences


def _word(mine: Sighting, other: Sighting) -> str:
    same = (
        mine.op == other.op
        and (other.payload_bytes in (UNKNOWN, mine.payload_bytes))
        and (not other.phase or other.phase == mine.phase)
        and (not other.region or other.region == mine.region)
        and (not other.groups or set(mine.groups) <= set(other.groups))
    )
    return AGREES if same else in_words(other)


def _count_open_fields(seen: Sighting) -> int:
    """How many of group, payload and phase the witness left open."""
    return (len(seen.groups) != 1) + (seen.payload_bytes == UNKNOWN) + (not seen.phase)


def _cover_events(
    recorded: Sequence[Sighting], events: Sequence[Event], forms: Mapping[int, ClosedForm]
) -> tuple[dict[tuple[int, int], str], list[Row]]:
    """The closed form's word on every event, and the calls that it states and that were not recorded."""
    words: dict[tuple[int, int], str] = {}
    left: dict[int, dict[EventKey | Term, _Left]] = {}
    for rank, form in forms.items():
        left[rank] = {line: (calls, None) for line, calls in form.complete.items()}
        left[rank] |= {term: (term.calls, term.total_bytes) for term in form.partial}
    in_order = sorted(events, key=lambda event: (event.rank, event.call_index))
    for seen, event in zip(recorded, in_order, strict=True):
        counting, of_rank = forms[seen.rank].find_counting_terms(key_of(event)), left[seen.rank]
        for one in counting:
            calls, total = of_rank[one]
            of_rank[one] = (
                None if calls is None else calls - 1,
                None if total is None else total - event.payload_bytes,
            )
        over = any(number is not None and number < 0 for one in counting for number in of_rank[one])
        words[seen.rank, seen.index] = AGREES if counting and not over else MISSING
    last = Counter(seen.rank for seen in recorded)
    extra = [
        Row(rank=rank, index=last[rank], recorded=None, words={CLOSED_FORM: _more(one, calls, total)})
        for rank, of_rank in left.items()
        for one, (calls, total) in of_rank.items()
        if (calls or 0) > 0 or (total or 0) > 0
    ]
    return words, extra


def _more(term: EventKey | Term, calls: int | None, total: int | None) -> str:
    """Words for calls that the closed form states and that were not recorded."""
    if isinstance(term, Term):
        lack = [f"{calls} call{'s' if calls > 1 else ''}"] if calls else []
        return f"{' of '.join([*lack, *([f'{total} B'] if total else [])])} more of {term}"
    where = f"of {term.payload_bytes} B over {term.axis} in {term.region or 'no module'}"
    return f"{calls} more {term.phase} {term.op} {where}"
