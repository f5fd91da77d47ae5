"""Two snapshots side by side: which cases are held against each other, what differs, and which limits are broken.

Cases with the same text are compared. Two others are compared, with a note, if they are the only ones left of a mode
and world size, or the only ones at all. A case of the base that the new run lacks is a breach, and so is a run that was
cut off.

The first lines of the report say what changed, in a sentence a mode. The sentence is derived from the events alone:
if all new calls lie in micro-batches or steps that the base does not have, it is "one more micro-batch"; what all other
changes have in common is named once.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from shardproof.harness.errors import RequestError
from shardproof.reports.comparing.compared_sides import EXACT, Limit, describe_breaches
from shardproof.reports.comparing.differences import align_events, find_changes, fold_changes, list_changes
from shardproof.reports.comparing.intervals import phase_times
from shardproof.reports.comparing.snapshot import CALLED, Snapshot, parse_span
from shardproof.reports.printing.text_tables import byte_size
from shardproof.reports.stored.frames import in_order

_UNITS = {"steps": ("step", "steps"), "microbatches": ("micro-batch", "micro-batches")}
OUTSIDE = "outside modules"


def describe_changes(
    folded: pd.DataFrame, traffic: pd.DataFrame, base: pd.DataFrame, new: pd.DataFrame
) -> Iterator[str]:
    """Sentences, from `fold_changes`, the traffic of a comparison and the counted events of both sides.

    Modes that changed alike share a sentence: "tp-sp: one more micro-batch: 54 calls, 1.6 MiB more on a rank".
    """
    modes: dict[str, list[str]] = {}
    for mode in dict.fromkeys(traffic["mode"].astype("str")):
        rows = folded[folded["mode"].astype("str") == mode]
        sides = [events[events["mode"].astype("str") == mode] for events in (base, new)]
        own = traffic[traffic["mode"].astype("str") == mode]
        if rows.empty:
            sentence = f"no event differs: {_amounts(own)}"
        else:
            sentence = f"{'; '.join(_find_reasons(rows, *sides))}: {_describe_growth(own)}"
        modes.setdefault(sentence, []).append(mode)
    yield from (f"{', '.join(names)}: {sentence}" for sentence, names in modes.items())


def _amounts(traffic: pd.DataFrame) -> str:
    calls, size = traffic["calls"].sum(), traffic["payload_bytes"].sum(skipna=False)
    return f"{_count_calls(int(calls))}, {byte_size(size) if pd.notna(size) else 'unknown bytes'} on a rank"


def _describe_growth(traffic: pd.DataFrame) -> str:
    """How many calls and bytes there are more on a rank, or fewer."""
    calls = int(traffic["new_calls"].sum() - traffic["calls"].sum())
    size = traffic["new_payload_bytes"].sum(skipna=False) - traffic["payload_bytes"].sum(skipna=False)
    sized = "unknown bytes" if pd.isna(size) else byte_size(abs(size))
    if pd.notna(size) and calls * size > 0:
        return f"{_count_calls(abs(calls))}, {sized} {'more' if calls > 0 else 'less'} on a rank"
    if not calls and pd.notna(size) and not size:
        return "as many calls and bytes on a rank"
    parts = [f"{_count_calls(abs(calls))} {'more' if calls > 0 else 'fewer'}" if calls else "as many calls"]
    parts += (
        ["as many bytes" if not size else f"{sized} {'more' if size > 0 else 'less'}"] if pd.notna(size) else [sized]
    )
    return f"{', '.join(parts)} on a rank"


def _find_reasons(rows: pd.DataFrame, base: pd.DataFrame, new: pd.DataFrame) -> Iterator[str]:
    """What the changes of one mode are, the widest reason first."""
    added = False
    for column, (one, many) in _UNITS.items():
        old, now = (_numbers(events[column]) for events in (base, new))
        for kind, numbers, way in (("new", now - old, "more"), ("gone", old - now, "fewer")):
            # A side without calls has no steps or micro-batches of which the other one has more.
            if not (numbers and (old if kind == "new" else now)):
                continue
            inside = rows["kind"].eq(kind) & rows[column].map(lambda text, of=numbers: {*parse_span(text)} <= of)
            if inside.any():
                added = True
                rows = rows[~inside]
                yield f"{'one' if len(numbers) == 1 else len(numbers)} {way} {one if len(numbers) == 1 else many}"
    if added:  # events at the end of a step are in its last micro-batch, so they moved with it
        rows = rows[rows["kind"] != "moved"]
    for word, own in rows.groupby("kind", sort=False):
        yield _describe_rows(str(word), own)


def _describe_rows(kind: str, rows: pd.DataFrame) -> str:
    """Changes of one kind: of several, what they have in common."""
    ops, phases, places = (list(dict.fromkeys(rows[name].astype("str"))) for name in ("op", "phase", "region"))
    where = f"in {_some(phases)} of {_some([place or OUTSIDE for place in places])}"
    if kind != "changed":
        return f"{kind} {_some(ops)} {where}"
    parts = [text.split(", ") for text in rows["what"]]
    shared = [part for part in parts[0] if all(part in other for other in parts)]
    names = dict.fromkeys(part.split()[0] for own in parts for part in own)
    return f"{', '.join(shared) or 'another ' + ' and '.join(names)} in {_some(ops)} {where}"


def _some(names: list[str]) -> str:
    """One or two names; of more, the first and the number of others."""
    return " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} others"


def _numbers(spans: Iterable[str]) -> set[int]:
    return {number for text in set(spans) for number in parse_span(text) if number >= 0}


def _count_calls(calls: int) -> str:
    return f"{calls:,} call{'' if calls == 1 else 's'}"


def total_by_rank(events: pd.DataFrame) -> pd.DataFrame:
    """case, mode, phase, op, rank, calls, payload_bytes: events added up; unknown bytes count as 0."""
    steps, micros = (
        events[name].map(lambda text: len(parse_span(text))).astype("int64") for name in ("steps", "microbatches")
    )
    cells = steps * micros * events["calls"]  # without events `map` alone would leave text
    frame = events[["case", "mode", "phase", "op"]].assign(
        calls=cells, payload_bytes=cells * events["payload_bytes"].clip(lower=0), rank=events["ranks"].map(parse_span)
    )
    each = frame.explode("rank").astype({"rank": "int64"})
    keys = ["case", "mode", "phase", "op", "rank"]
    return each.groupby(keys, observed=True, sort=False)[["calls", "payload_bytes"]].sum().reset_index()


_KEYS = ["mode", "phase"]
_COUNTS = ["calls", "payload_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """Result of a comparison.

    changes   what changed, a sentence for modes that changed alike, also if nothing did
    traffic   mode, phase, calls, new_calls, payload_bytes, new_payload_bytes: of one rank, cases added up
    by_op     the same by mode, phase and op
    events    the differences (reports.comparing.differences.list_changes)
    folded    the same, layers and cases of a mode folded (fold_changes)
    times     phase by phase (reports.comparing.intervals)
    memory    case, saved_bytes, new_saved_bytes: of the fullest rank
    notes     what must be known before the numbers: other cases, versions or machines
    breaches  one sentence for every broken limit; empty when all hold
    lines     of a recorded program: where it issues what is new, changed or moved, a sentence an event
    """

    base: str
    new: str
    changes: tuple[str, ...]
    traffic: pd.DataFrame
    by_op: pd.DataFrame
    events: pd.DataFrame
    folded: pd.DataFrame
    times: pd.DataFrame
    memory: pd.DataFrame
    asked: tuple[Limit, ...]
    notes: tuple[str, ...]
    breaches: tuple[str, ...]
    lines: tuple[str, ...] = ()


def compare(base: Snapshot, new: Snapshot, asked: Sequence[Limit] = EXACT) -> Comparison:
    """Hold `new` against `base`. Raises RequestError when they have no case to compare."""
    pairs = _pair_cases(base.cases, new.cases)
    if not pairs:
        raise RequestError(
            f"run {new.name}: has no case in common with {base.name}; legal: runs of the same cases, or of one each"
        )
    renamed = {theirs: ours for ours, theirs in pairs.items()}
    modes = dict(zip(base.cases["case"], base.cases["mode"], strict=True))
    one = {
        name: _select_cases(getattr(base, name), dict.fromkeys(pairs), modes) for name in ("events", "times", "memory")
    }
    two = {name: _select_cases(getattr(new, name), renamed, modes) for name in ("events", "times", "memory")}
    one["events"], two["events"], left_out = align_events(base.env, one["events"], new.env, two["events"])
    by_rank = _join_sizes(total_by_rank(one["events"]), total_by_rank(two["events"]))
    changes = find_changes(one["events"], two["events"])
    events, folded = (
        in_order(frame).sort_values(["mode", *more, "phase", "region"], kind="stable", ignore_index=True)
        for frame, more in ((list_changes(changes), ["case"]), (fold_changes(changes), []))
    )
    traffic = _without_unknown(_join_traffic(by_rank, _KEYS), one["events"], two["events"])
    times = in_order(phase_times(one["times"], two["times"])).sort_values(_KEYS, kind="stable", ignore_index=True)
    memory = _join_memory(one["memory"], two["memory"])
    lost = [case for case in base.cases["case"] if case not in pairs]
    return Comparison(
        base=base.name,
        new=new.name,
        changes=tuple(describe_changes(folded, traffic, one["events"], two["events"])),
        traffic=traffic,
        by_op=_without_unknown(_join_traffic(by_rank, [*_KEYS, "op"]), one["events"], two["events"]),
        events=events,
        folded=folded,
        times=times,
        memory=memory,
        asked=tuple(asked),
        notes=(*_comparison_notes(base, new, pairs), *left_out),
        breaches=(
            *(f"{side.name} was cut off, so that nothing is proved: {side.cut[0]}" for side in (base, new) if side.cut),
            *(f"case {case}: is in {base.name} and not in {new.name}" for case in lost),
            *_limits_without_bytes(asked, one["events"], two["events"]),
            *describe_breaches(asked, folded, _busiest_rank(by_rank, ["case"]), memory, times),
        ),
        lines=tuple(_count_equal_lines(_changed_lines(base, new, events))),
    )


def _limits_without_bytes(asked: Sequence[Limit], *sides: pd.DataFrame) -> Iterator[str]:
    """A breach, if a limit of bytes is asked for and traces do not know the bytes of every call."""
    unknown = [int((events["payload_bytes"] < 0).sum()) for events in sides]
    if any(unknown) and any(limit.what == "bytes" for limit in asked):
        yield "bytes: are not judged, since the traces do not know those of every call"


def _without_unknown(traffic: pd.DataFrame, *sides: pd.DataFrame) -> pd.DataFrame:
    """The traffic with NA for the bytes of a phase in which a trace does not know those of every call."""
    for name, events in zip(("payload_bytes", "new_payload_bytes"), sides, strict=True):
        phases = set(events.loc[events["payload_bytes"] < 0, "phase"].astype("str"))
        traffic[name] = traffic[name].astype("Int64").mask(traffic["phase"].astype("str").isin(phases))
    return traffic


def _changed_lines(base: Snapshot, new: Snapshot, events: pd.DataFrame) -> Iterator[str]:
    """The lines of the program of new, changed or moved events: those that issued no such call in the base, if any."""
    for event in events[events["kind"] != "gone"].to_dict("records") if new.callers else ():
        place = tuple(str(event[name]) for name in CALLED)
        found, before = new.callers.get(place, ()), set(base.callers.get(place, ()))
        if at := [line for line in found if line not in before] or found:
            where = f" in {event['region']}" if event["region"] else ""
            yield f"{event['kind']}: {event['phase']} {event['op']} over {event['axis']}{where}, at {', '.join(at[:3])}"


def _count_equal_lines(lines: Iterable[str]) -> Iterator[str]:
    """Each sentence once, with the number of events that it holds for where these are several."""
    for line, events in Counter(lines).items():
        yield line if events == 1 else f"{line} ({events} events)"


def _pair_cases(base: pd.DataFrame, new: pd.DataFrame) -> dict[str, str]:
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


def _select_cases(frame: pd.DataFrame, names: Mapping[str, str | None], modes: Mapping[str, str]) -> pd.DataFrame:
    """The rows of these cases, under the case and mode of the base."""
    rows = frame[frame["case"].isin(names)]
    rows = rows.assign(case=rows["case"].map(lambda case: names[case] or case))
    return rows.assign(mode=rows["case"].map(modes)).astype({"mode": "str", "case": "str"}) if "mode" in rows else rows


def _join_sizes(base: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """case, mode, phase, op, rank, and both sides' calls and bytes; 0 where one has none."""
    keys = ["case", "mode", "phase", "op", "rank"]
    both = base.merge(new.rename(columns={name: f"new_{name}" for name in _COUNTS}), how="outer", on=keys)
    names = [*_COUNTS, *(f"new_{name}" for name in _COUNTS)]
    return both.fillna(dict.fromkeys(names, 0)).astype(dict.fromkeys(names, "int64"))


def _busiest_rank(sizes: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Calls and bytes of the rank that has most of them."""
    ranks = sizes.groupby([*keys, "rank"], observed=True, sort=False).sum(numeric_only=True)
    return ranks.groupby(keys, observed=True, sort=False).max().reset_index()


def _join_traffic(sizes: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    ranks = in_order(_busiest_rank(sizes, ["case", *keys]))
    names = ["calls", "new_calls", "payload_bytes", "new_payload_bytes"]
    return ranks.groupby(keys, observed=True, sort=True)[names].sum().reset_index()


def _join_memory(base: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    old, now = (frame.groupby("case", sort=False)["saved_bytes"].max() for frame in (base, new))
    return pd.concat([old, now.rename("new_saved_bytes")], axis=1, join="inner").rename_axis("case").reset_index()


def _comparison_notes(base: Snapshot, new: Snapshot, pairs: Mapping[str, str]) -> Iterator[str]:
    for snapshot in (base, new):
        yield from (f"{snapshot.name}: {note}" for note in snapshot.notes)
    yield from (f"different cases are compared: {old} with {now}" for old, now in pairs.items() if old != now)
    for case in new.cases["case"]:
        if case not in pairs.values():
            yield f"only {new.name} has the case {case}: not compared"
    for what, kind in (("request", "runs"), ("versions", "versions"), ("machine", "machines")):
        apart = [
            f"{key} {old} and {now}" for key, old, now in _differing_entries(base.env.get(what), new.env.get(what))
        ]
        if apart:
            yield f"different {kind} are compared: {', '.join(apart)}"


def _differing_entries(one: Any, other: Any) -> Iterator[tuple[str, object, object]]:
    """Entries in which two objects of env.json differ, `cases` aside; none where either is no object."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other} - {"cases"}):
            if one.get(key) != other.get(key):
                yield key, one.get(key, "none"), other.get(key, "none")
