"""Which events are new, gone or changed between two snapshots: exactly, in as few facts as they are.

The unit is one event at one place (case, phase, module, op) on the ranks, steps and micro-batches where it differs. An
event that is gone and one that is new at the same place, equally often on the same ranks, are one changed event, and
only what changed is listed: doubling a payload, or a wider dtype, is one fact and not two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import pandas as pd

from reports.comparing.snapshot import WHAT, members, span

COLUMNS = (
    *("kind", "case", "mode", "phase", "region", "op", "axis", "what"),
    *("base_calls", "new_calls", "base_payload_bytes", "new_payload_bytes", "ranks", "steps", "microbatches"),
)
_PLACE = ["case", "mode", "phase", "region", "op"]
_TELLING = ("dtype", "shape", "payload_bytes", "reduce_op", "axis", "group_size", "is_async")
"""Parts of an event in the order in which their changes are reported."""
EventSite = tuple[str, ...]
What = tuple[object, ...]
Cells = Counter[tuple[int, int, int]]
"""(rank, step, micro-batch) -> calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """One fact: `base` became `new` in these cells; None where there is no event."""

    base: What | None
    new: What | None
    cells: Cells


def differences(base: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """One row a fact; empty when both hold the same events.

    kind ("new", "gone", "changed"), case, mode, phase, region, op, axis, what (in words), base_calls, new_calls,
    base_payload_bytes, new_payload_bytes (of the differing events, on the rank that has most of them), ranks, steps,
    microbatches.
    """
    both = base.merge(new, how="outer", on=list(base.columns), indicator="side")
    old, now = (_by_place(both[both["side"] == side]) for side in ("left_only", "right_only"))
    rows = []
    for place in {**old, **now}:
        gone, fresh = old.get(place, {}), now.get(place, {})
        rows += [_row(place, change) for change in _changes(gone, fresh)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _by_place(events: pd.DataFrame) -> dict[EventSite, dict[What, Cells]]:
    places: defaultdict[EventSite, dict[What, Cells]] = defaultdict(dict)
    names = [*_PLACE, *WHAT, "calls", "ranks", "steps", "microbatches"]
    for row in events[names].itertuples(index=False, name=None):
        place, what, (calls, *spans) = row[:5], row[5 : 5 + len(WHAT)], row[5 + len(WHAT) :]
        cells = places[place].setdefault(what, Counter())
        for rank, step, micro in product(*(members(text) for text in spans)):
            cells[rank, step, micro] += calls
    return dict(places)


def _changes(old: Mapping[What, Cells], now: Mapping[What, Cells]) -> Iterator[_Change]:
    gone = {what: cells - now.get(what, Counter()) for what, cells in old.items()}
    fresh = {what: cells - old.get(what, Counter()) for what, cells in now.items()}
    pairs = ((_distance(a, b), a, b) for a, b in product(gone, fresh) if a != b)
    for _, before, after in sorted(pairs, key=lambda pair: pair[0]):
        if shared := gone[before] & fresh[after]:
            gone[before], fresh[after] = gone[before] - shared, fresh[after] - shared
            yield _Change(base=before, new=after, cells=shared)
    yield from (_Change(base=what, new=None, cells=cells) for what, cells in gone.items() if cells)
    yield from (_Change(base=None, new=what, cells=cells) for what, cells in fresh.items() if cells)


def _distance(one: What, other: What) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def _row(place: EventSite, change: _Change) -> tuple[object, ...]:
    what = change.base or change.new or ()
    calls = _most(change.cells)
    kind = "new" if change.base is None else "gone" if change.new is None else "changed"
    sizes = (_part(side, "payload_bytes") if side else 0 for side in (change.base, change.new))
    amounts = calls * (change.base is not None), calls * (change.new is not None)
    spans = (span({cell[axis] for cell in change.cells}) for axis in range(3))
    told = dict(zip(WHAT, what, strict=True))["axis"], _told(place[4], change)
    return kind, *place, *told, *amounts, *(calls * size for size in sizes), *spans


def _most(cells: Cells) -> int:
    """Calls of the rank that has most of them."""
    ranks: Counter[int] = Counter()
    for (rank, _, _), calls in cells.items():
        ranks[rank] += calls
    return max(ranks.values())


def _part(what: What, name: str) -> int:
    return int(str(dict(zip(WHAT, what, strict=True))[name]))


def _told(op: str, change: _Change) -> str:
    """The fact in words, once for all its calls."""
    if change.base is None or change.new is None:
        event = dict(zip(WHAT, change.base or change.new or (), strict=True))
        reduced = f" ({event['reduce_op']})" if event["reduce_op"] else ""
        return f"{op}{reduced} of {event['dtype']} {event['shape'] or 'scalar'}, {event['payload_bytes']:,} bytes"
    before, after = (dict(zip(WHAT, side, strict=True)) for side in (change.base, change.new))
    return ", ".join(
        f"{name} {_value(before[name])} -> {_value(after[name])}" for name in _TELLING if before[name] != after[name]
    )


def _value(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value) or "none"


def totals(events: pd.DataFrame) -> pd.DataFrame:
    """case, mode, phase, rank, calls, payload_bytes of a snapshot's events: everything added up."""
    steps, micros = (events[name].map(_size).astype("int64") for name in ("steps", "microbatches"))
    cells = steps * micros * events["calls"]  # of no events too: then `map` alone would leave text
    frame = events[["case", "mode", "phase"]].assign(
        calls=cells, payload_bytes=cells * events["payload_bytes"], rank=events["ranks"].map(members)
    )
    each = frame.explode("rank").astype({"rank": "int64"})
    sums = each.groupby(["case", "mode", "phase", "rank"], observed=True, sort=False)[["calls", "payload_bytes"]].sum()
    return sums.reset_index()


def _size(text: str) -> int:
    return len(members(text))
