"""What differs between two tables of counted events, as facts: new, gone, changed, moved.

The unit of a difference is one event at one place (case, phase, module, op), on the ranks, steps and micro-batches
where it differs. An event that is gone and one that is new at the same place, equally often on the same ranks, are one
changed event, of which only the parts that changed are listed: a wider dtype and its larger payload are one fact. An
event that is gone in one micro-batch and new in another, on the same rank in the same step, has moved.

A column that a trace does not know, while the other side knows it, is not compared. If the sides have other ranks,
events are compared without the rank, each as often as on the rank that issued it most often.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pandas as pd

from shardproof.reports.comparing.snapshot import WHAT, count_events, format_span, parse_span
from shardproof.reports.stored.frames import LAYER_NUMBER

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
class EventChange:
    """A fact at a place: `base` became `new` in these cells; None if there is no event.

    `left` are the cells that a moved event was in; then `base` and `new` are the same.
    """

    place: EventSite
    base: What | None
    new: What | None
    cells: Cells
    left: Cells = field(default_factory=Counter)


def find_changes(base: pd.DataFrame, new: pd.DataFrame) -> list[EventChange]:
    """The facts; none if both tables hold the same events."""
    both = base.merge(new, how="outer", on=list(base.columns), indicator="side")
    old, now = (_by_place(both[both["side"] == side]) for side in ("left_only", "right_only"))
    return [
        change for place in {**old, **now} for change in _pair_changes(place, old.get(place, {}), now.get(place, {}))
    ]


def list_changes(changes: Iterable[EventChange]) -> pd.DataFrame:
    """Facts, a row each.

    kind ("new", "gone", "changed", "moved"), case, mode, phase, region, op, axis, what (in words), base_calls,
    new_calls, base_payload_bytes, new_payload_bytes, ranks, steps, microbatches. Calls and bytes are of the differing
    events, on the rank that has most of them.
    """
    return pd.DataFrame([_row_of_change(change) for change in changes], columns=list(COLUMNS))


def fold_changes(changes: Iterable[EventChange]) -> pd.DataFrame:
    """Facts as in `list_changes`, with those of all layers and of all cases of a mode in one row.

    region is "layers.*.mlp.w1" for several layers, modules is their number, and cases is the number of cases.
    """
    groups: defaultdict[tuple[object, ...], list[EventChange]] = defaultdict(list)
    for one in changes:
        _, mode, phase, region, op = one.place
        groups[mode, phase, re.sub(LAYER_NUMBER, "*", region), op, one.base, one.new, _label_moved(one)].append(one)
    rows = []
    for first, *rest in groups.values():
        own = (first, *rest)
        case, mode, phase, region, op = first.place
        regions = {one.place[3] for one in own}
        folded = re.sub(LAYER_NUMBER, "*", region) if len(regions) > 1 else region
        cells, left = Cells(), Cells()
        for one in own:
            cells, left = cells + one.cells, left + one.left
        whole = replace(first, place=(case, mode, phase, folded, op), cells=cells, left=left)
        rows.append((*_row_of_change(whole), len(regions), len({one.place[0] for one in own})))
    return pd.DataFrame(rows, columns=[*COLUMNS, "modules", "cases"])


def _by_place(events: pd.DataFrame) -> dict[EventSite, dict[What, Cells]]:
    places: defaultdict[EventSite, dict[What, Cells]] = defaultdict(dict)
    names = [*_PLACE, *WHAT, "calls", "ranks", "steps", "microbatches"]
    for row in events[names].itertuples(index=False, name=None):
        place, what, (calls, *spans) = row[:5], row[5 : 5 + len(WHAT)], row[5 + len(WHAT) :]
        cells = places[place].setdefault(what, Counter())
        for rank, step, micro in product(*(parse_span(text) for text in spans)):
            cells[rank, step, micro] += calls
    return dict(places)


def _pair_changes(place: EventSite, old: Mapping[What, Cells], now: Mapping[What, Cells]) -> Iterator[EventChange]:
    gone = {what: cells - now.get(what, Counter()) for what, cells in old.items()}
    fresh = {what: cells - old.get(what, Counter()) for what, cells in now.items()}
    pairs = ((sum(x != y for x, y in zip(a, b, strict=True)), a, b) for a, b in product(gone, fresh) if a != b)
    for _, before, after in sorted(pairs, key=lambda pair: pair[0]):
        if shared := gone[before] & fresh[after]:
            gone[before], fresh[after] = gone[before] - shared, fresh[after] - shared
            yield EventChange(place=place, base=before, new=after, cells=shared)
    for what in [what for what in gone if what in fresh]:
        left, cells = _moved_cells(gone[what], fresh[what])
        if cells:
            gone[what], fresh[what] = gone[what] - left, fresh[what] - cells
            yield EventChange(place=place, base=what, new=what, cells=cells, left=left)
    yield from (EventChange(place=place, base=what, new=None, cells=cells) for what, cells in gone.items() if cells)
    yield from (EventChange(place=place, base=None, new=what, cells=cells) for what, cells in fresh.items() if cells)


def _moved_cells(gone: Cells, fresh: Cells) -> tuple[Cells, Cells]:
    """The cells that calls of one event left, and those they are in now, paired on the same rank in the same step."""
    left, taken = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
    ends: list[defaultdict[tuple[int, int], list[int]]] = [defaultdict(list), defaultdict(list)]
    for end, cells in zip(ends, (gone, fresh), strict=True):
        for rank, step, micro in sorted(cells.elements()):
            end[rank, step].append(micro)
    for place in ends[0]:
        for before, after in zip(ends[0][place], ends[1].get(place, ()), strict=False):  # the others are gone, or new
            left[*place, before] += 1
            taken[*place, after] += 1
    return left, taken


def _row_of_change(change: EventChange) -> tuple[object, ...]:
    what = change.base or change.new or ()
    calls = _most_calls(change.cells)
    kind = "new" if change.base is None else "gone" if change.new is None else "moved" if change.left else "changed"
    sizes = (max(0, int(str(side[WHAT.index("payload_bytes")]))) if side else 0 for side in (change.base, change.new))
    amounts = calls * (change.base is not None), calls * (change.new is not None)
    spans = (format_span({cell[axis] for cell in change.cells}) for axis in range(3))
    labels = what[WHAT.index("axis")], _in_words(change)
    return kind, *change.place, *labels, *amounts, *(calls * size for size in sizes), *spans


def _most_calls(cells: Cells) -> int:
    """The calls of the rank that has most of them."""
    ranks: Counter[int] = Counter()
    for (rank, _, _), calls in cells.items():
        ranks[rank] += calls
    return max(ranks.values())


def _in_words(change: EventChange) -> str:
    """The fact in words, once for all its calls."""
    if change.base is None or change.new is None or change.left:
        event = dict(zip(WHAT, change.base or change.new or (), strict=True))
        reduced = f" ({event['reduce_op']})" if event["reduce_op"] else ""
        size = f"{event['payload_bytes']:,} bytes" if event["payload_bytes"] != -1 else "of unknown bytes"
        words = f"{change.place[4]}{reduced} of {event['dtype']} {event['shape'] or 'scalar'}, {size}"
        return f"{words}, {_label_moved(change)}" if change.left else words
    before, after = (dict(zip(WHAT, side, strict=True)) for side in (change.base, change.new))
    return ", ".join(
        f"{name} {_text_of_value(before[name])} -> {_text_of_value(after[name])}"
        for name in _TELLING
        if before[name] != after[name]
    )


def _label_moved(change: EventChange) -> str:
    """The micro-batches that an event left and those that it is in now; "" if it did not move."""
    if not change.left:
        return ""
    before, after = (format_span({cell[2] for cell in cells}) for cells in (change.left, change.cells))
    return f"micro-batch {before} -> {after}"


def _text_of_value(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value) or "none"


_UNKNOWN: Mapping[str, tuple[str, str | int]] = {
    "phase": ("phase", "?"),
    "region": ("module", "?"),
    "axis": ("group", "?"),
    "group_size": ("size of the group", -1),
    "reduce_op": ("reduce op", "?"),
    "dtype": ("dtype", "?"),
    "shape": ("shape", "?"),
    "payload_bytes": ("bytes", -1),
    "is_async": ("asynchrony", False),
    "step": ("step", -1),
    "microbatch": ("micro-batch", -1),
}
"""Columns -> their names in words, and the value that means unknown."""


def align_events(
    base_env: Mapping[str, Any], base: pd.DataFrame, new_env: Mapping[str, Any], new: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """Both tables of events in comparable form, and sentences on what is left out. Unchanged without traces."""
    if "source" not in base_env and "source" not in new_env:
        return base, new, []
    one, two = (_one_by_one(events) for events in (base, new))
    unknown = [{*env.get("unknown", {}).get("columns", {})} for env in (base_env, new_env)]
    left_out = [name for name in _UNKNOWN if (name in unknown[0]) != (name in unknown[1])]
    for name in left_out:
        one[name] = two[name] = _UNKNOWN[name][1]
    words = [_UNKNOWN[name][0] for name in left_out]
    notes = [f"not compared, since only one side knows them: {', '.join(words)}"] if words else []
    ranks = [format_span(set(events["rank"])) for events in (one, two)]
    if ranks[0] != ranks[1]:
        one, two = _of_one_rank(one), _of_one_rank(two)
        notes.append(
            f"the ranks are {ranks[0] or 'none'} and {ranks[1] or 'none'}, so events are compared without the rank: "
            "each as often as the rank that has most of it issued it"
        )
    return count_events(one), count_events(two), notes


def _one_by_one(events: pd.DataFrame) -> pd.DataFrame:
    """A row for every event, with `rank`, `step` and `microbatch`."""
    frame = events.rename(columns={"ranks": "rank", "steps": "step", "microbatches": "microbatch"})
    for name in ("rank", "step", "microbatch"):
        frame = frame.assign(**{name: frame[name].map(parse_span)}).explode(name, ignore_index=True)
        frame[name] = frame[name].astype("int64")
    return frame.loc[frame.index.repeat(frame["calls"])].drop(columns="calls").reset_index(drop=True)


def _of_one_rank(events: pd.DataFrame) -> pd.DataFrame:
    """The events of a single rank: each as often as on the rank that has most of it."""
    kinds = [name for name in events.columns if name != "rank"]
    number = events.groupby([*kinds, "rank"], observed=True).cumcount()
    return events.assign(number=number, rank=0).drop_duplicates([*kinds, "number"]).drop(columns="number")
