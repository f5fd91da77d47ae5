"""Two snapshots side by side: which cases are held against each other, what differs, and which limits are broken.

Cases with the same text are compared. Others are only compared when it is plain which stands for which (the only one
left of its mode and world size, or the only one at all), and a note says so. A case of the base that the new run lacks
breaks the comparison: nothing can be said of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.errors import RequestError
from reports.comparing.differences import differences, totals
from reports.comparing.intervals import phase_times
from reports.comparing.limits import EXACT, Limit, breaches
from reports.comparing.snapshot import CALLED, Snapshot
from reports.stored.frames import in_order

_KEYS = ["mode", "phase"]
_COUNTS = ["calls", "payload_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """What came of it.

    traffic   mode, phase, calls, new_calls, payload_bytes, new_payload_bytes: of one rank, cases added up
    events    the differences (reports.differences)
    times     phase by phase (reports.intervals)
    memory    case, saved_bytes, new_saved_bytes: of the fullest rank
    notes     what must be known before the numbers: other cases, versions or machines
    breaches  one sentence for every broken limit; empty when all hold
    lines     of a recorded program: where it issues what is new or changed, a sentence an event
    """

    base: str
    new: str
    traffic: pd.DataFrame
    events: pd.DataFrame
    times: pd.DataFrame
    memory: pd.DataFrame
    asked: tuple[Limit, ...]
    notes: tuple[str, ...]
    breaches: tuple[str, ...]
    lines: tuple[str, ...] = ()


def compare(base: Snapshot, new: Snapshot, asked: Sequence[Limit] = EXACT) -> Comparison:
    """Hold `new` against `base`. Raises RequestError when they have no case to compare."""
    pairs = _pairs(base.cases, new.cases)
    if not pairs:
        raise RequestError(
            f"run {new.name}: has no case in common with {base.name}; legal: runs of the same cases, or of one each"
        )
    renamed = {theirs: ours for ours, theirs in pairs.items()}
    modes = dict(zip(base.cases["case"], base.cases["mode"], strict=True))
    one = {name: _of(getattr(base, name), dict.fromkeys(pairs), modes) for name in ("events", "times", "memory")}
    two = {name: _of(getattr(new, name), renamed, modes) for name in ("events", "times", "memory")}
    by_rank = _sizes(totals(one["events"]), totals(two["events"]))
    events = in_order(differences(one["events"], two["events"]))
    events = events.sort_values(["mode", "case", "phase", "region"], kind="stable", ignore_index=True)
    times = in_order(phase_times(one["times"], two["times"])).sort_values(_KEYS, kind="stable", ignore_index=True)
    memory = _memory(one["memory"], two["memory"])
    lost = [case for case in base.cases["case"] if case not in pairs]
    return Comparison(
        base=base.name,
        new=new.name,
        traffic=_traffic(by_rank),
        events=events,
        times=times,
        memory=memory,
        asked=tuple(asked),
        notes=tuple(_notes(base, new, pairs)),
        breaches=(
            *(f"case {case}: is in {base.name} and not in {new.name}" for case in lost),
            *breaches(asked, events, _busiest(by_rank, ["case"]), memory, times),
        ),
        lines=tuple(_lines(base, new, events)),
    )


def _lines(base: Snapshot, new: Snapshot, events: pd.DataFrame) -> Iterator[str]:
    """The lines of the program behind new and changed events: those that issued no such call in the base, if any."""
    for event in events[events["kind"] != "gone"].to_dict("records") if new.callers else ():
        place = tuple(str(event[name]) for name in CALLED)
        found, before = new.callers.get(place, ()), set(base.callers.get(place, ()))
        if at := [line for line in found if line not in before] or found:
            where = f" in {event['region']}" if event["region"] else ""
            yield f"{event['kind']}: {event['phase']} {event['op']} over {event['axis']}{where}, at {', '.join(at[:3])}"


def _pairs(base: pd.DataFrame, new: pd.DataFrame) -> dict[str, str]:
    """Case of the base -> case of the new run."""
    ours, theirs = list(base["case"]), list(new["case"])
    pairs = {case: case for case in ours if case in set(theirs)}
    keys = ["mode", "world_size"]
    left, right = (frame[~frame["case"].isin(pairs)] for frame in (base, new))
    alone = [frame[~frame.duplicated(keys, keep=False)] for frame in (left, right)]
    found = alone[0].merge(alone[1], on=keys, suffixes=("", "_new"))
    pairs |= dict(zip(found["case"], found["case_new"], strict=True))
    if not pairs and len(ours) == len(theirs) == 1:
        pairs = {ours[0]: theirs[0]}
    return pairs


def _of(frame: pd.DataFrame, names: Mapping[str, str | None], modes: Mapping[str, str]) -> pd.DataFrame:
    """The rows of these cases, under the case and mode of the base."""
    rows = frame[frame["case"].isin(names)]
    rows = rows.assign(case=rows["case"].map(lambda case: names[case] or case))
    return rows.assign(mode=rows["case"].map(modes)).astype({"mode": "str", "case": "str"}) if "mode" in rows else rows


def _sizes(base: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """case, mode, phase, rank, and both sides' calls and bytes; 0 where one has none."""
    keys = ["case", "mode", "phase", "rank"]
    both = base.merge(new.rename(columns={name: f"new_{name}" for name in _COUNTS}), how="outer", on=keys)
    names = [*_COUNTS, *(f"new_{name}" for name in _COUNTS)]
    return both.fillna(dict.fromkeys(names, 0)).astype(dict.fromkeys(names, "int64"))


def _busiest(sizes: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Calls and bytes of the rank that has most of them."""
    ranks = sizes.groupby([*keys, "rank"], observed=True, sort=False).sum(numeric_only=True)
    return ranks.groupby(keys, observed=True, sort=False).max().reset_index()


def _traffic(sizes: pd.DataFrame) -> pd.DataFrame:
    ranks = in_order(_busiest(sizes, ["case", *_KEYS]))
    names = ["calls", "new_calls", "payload_bytes", "new_payload_bytes"]
    return ranks.groupby(_KEYS, observed=True, sort=True)[names].sum().reset_index()


def _memory(base: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    old, now = (frame.groupby("case", sort=False)["saved_bytes"].max() for frame in (base, new))
    return pd.concat([old, now.rename("new_saved_bytes")], axis=1, join="inner").rename_axis("case").reset_index()


def _notes(base: Snapshot, new: Snapshot, pairs: Mapping[str, str]) -> Iterator[str]:
    for snapshot in (base, new):
        yield from (f"{snapshot.name}: {note}" for note in snapshot.notes)
    yield from (f"different cases are compared: {old} with {now}" for old, now in pairs.items() if old != now)
    for case in new.cases["case"]:
        if case not in pairs.values():
            yield f"only {new.name} has the case {case}: not compared"
    for what, kind in (("request", "runs"), ("versions", "versions"), ("machine", "machines")):
        apart = [f"{key} {old} and {now}" for key, old, now in _apart(base.env.get(what), new.env.get(what))]
        if apart:
            yield f"different {kind} are compared: {', '.join(apart)}"


def _apart(one: Any, other: Any) -> Iterator[tuple[str, object, object]]:
    """Entries of two objects that differ; what is measured in neither, or is no object, is left out."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other} - {"cases"}):
            if one.get(key) != other.get(key):
                yield key, one.get(key, "none"), other.get(key, "none")
