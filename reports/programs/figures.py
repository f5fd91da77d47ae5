"""Figures of a recorded program, as frames: traffic, modules, steps, ranks, laws. Nothing is printed.

Only what follows from the recording is told. Durations are those of calls that are waited for at once, on the host's
clock or, in traces, the device's. Lateness needs one clock for all ranks, except in traces. Bytes, microseconds.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pandas as pd

from shardproof.harness.checking.laws import broken_laws
from shardproof.harness.errors import name_ranks, ranks_text
from shardproof.harness.ledger import Event
from shardproof.reports.comparing.snapshot import format_span
from shardproof.reports.programs.unlike import find_unlike_steps, median_over_steps
from shardproof.reports.stored.files import DEVICE_TYPES, GROUP_TYPES, STEP_TYPES, about_ranks, ends_of
from shardproof.reports.stored.frames import LAYER_NUMBER, Run, join_ranks

_MOST_LAWFUL = 100_000
"""The most events that the laws are checked on: whole steps from the first on."""
_MESSAGES = ("send", "recv")
_KEYS = ["phase", "op", "axis", "group_size"]
_PLACE = ["region", "phase", "axis"]


def program_traffic(run: Run) -> pd.DataFrame:
    """phase, op, axis, group_size, calls, payload_bytes, wire_bytes (of the rank that has most), per_step (its calls in
    the median recorded step), in_calls_us (mean over ranks).
    """
    events = run.ledger.assign(sized=run.ledger["wire_bytes"].notna())  # calls of unknown bytes have a row of their own
    one = events.groupby([*_KEYS, "sized", "rank"], observed=True)
    sums = one.agg(
        calls=("op", "size"),
        payload_bytes=("payload_bytes", total),
        wire_bytes=("wire_bytes", total),
        in_calls_us=("duration_us", _known_total),
    )
    keys = [*_KEYS, "sized"]
    kinds = sums.groupby(keys, observed=True)
    frame = kinds[["calls", "payload_bytes", "wire_bytes"]].agg(most).join(kinds["in_calls_us"].mean())
    each = events.groupby([*keys, "rank", "step"], observed=True).size().groupby([*keys, "step"], observed=True).max()
    number = max(1, events["step"].nunique())
    frame["per_step"] = each.groupby(keys, observed=True).agg(lambda calls: median_over_steps(calls, number))
    return with_known_sizes(frame.sort_index().reset_index())


def total(values: pd.Series) -> Any:
    """The sum; NA if one of them is unknown."""
    return values.sum(skipna=False)


def most(values: pd.Series) -> Any:
    """The largest; NA if one of them is unknown."""
    return values.max(skipna=False)


def _known_total(values: pd.Series) -> Any:
    """The sum of the known ones; NA if there are none."""
    return values.sum(min_count=1)


def with_known_sizes(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with NA for the size of a group if traces do not know it."""
    sizes = frame["group_size"].astype("Int64")
    return frame.assign(group_size=sizes.mask(sizes < 0))


def by_module(run: Run) -> pd.DataFrame:
    """folded (region, layers as "layers.*"), layers (how many regions); forward, backward, send, recv and other calls,
    payload_bytes, wire_bytes of the rank that has most. Most wire bytes first; messages count as send or recv alone.
    """
    events = run.ledger
    ways = events["phase"].astype("str").where(events["phase"].isin(["forward", "backward"]), "other")
    ways = ways.where(~events["op"].isin(_MESSAGES), events["op"].astype("str"))
    frame = events.assign(way=ways, folded=events["region"].str.replace(LAYER_NUMBER, "*", regex=True))
    one = frame.groupby(["folded", "rank"], observed=True)
    sums = one[["payload_bytes", "wire_bytes"]].agg(total)
    for way in ("forward", "backward", *_MESSAGES, "other"):
        calls = frame[frame["way"] == way].groupby(["folded", "rank"], observed=True).size()
        sums[way] = calls.reindex(sums.index, fill_value=0)
    sums = sums.groupby("folded", observed=True).agg(most).reset_index()
    sums["layers"] = sums["folded"].map(frame.groupby("folded", observed=True)["region"].nunique())
    return sums.sort_values("wire_bytes", ascending=False, kind="stable", ignore_index=True)


def list_exchanges(run: Run) -> pd.DataFrame:
    """The places whose all-to-alls send different numbers of rows to the ranks.

    Columns: region (layers folded), phase, axis, calls (of all ranks), rows, busiest (the rank that gets most rows),
    its busiest_rows and busiest_bytes, balance (its rows over the mean of the ranks of its axis), worst (the
    greatest balance of one exchange).
    """
    events = add_group_ranks(run)
    sent = events.get("sent_rows", pd.Series("", index=events.index)).astype("str")
    events = events.assign(sent=sent)[~sent.isin(["", "?"]) & (events["ranks"] != "")]
    if not len(events):
        return pd.DataFrame()
    events["number"] = events.groupby(["axis", "ranks", "rank"], observed=True).cumcount()
    rows = pd.DataFrame(
        (place[0], *place[1:], to, many, size * many / max(1, sum(shares)))
        for *place, size, ranks, text in events[
            ["region", "phase", "axis", "ranks", "number", "payload_bytes", "ranks", "sent"]
        ].itertuples(index=False)
        for shares in [[int(one) for one in str(text).split("+")]]
        for to, many in zip(map(int, str(ranks).split()), shares, strict=True)
    )
    rows.columns = pd.Index(["region", "phase", "axis", "ranks", "number", "to", "rows", "bytes"])
    rows["region"] = rows["region"].str.replace(LAYER_NUMBER, "*", regex=True)
    places = rows.groupby(_PLACE)
    return pd.DataFrame([_row_of_exchange(key, part) for key, part in places if part["rows"].nunique() > 1])


def _row_of_exchange(key: Any, rows: pd.DataFrame) -> dict[str, Any]:
    """A row of `list_exchanges`, from the rows that each call of one place sends to each rank."""
    got = rows.groupby("to")[["rows", "bytes"]].sum()
    one = rows.groupby(["ranks", "number", "to"])["rows"].sum().groupby(["ranks", "number"])
    busiest = int(str(got["rows"].idxmax()))
    return {
        **dict(zip(_PLACE, key, strict=True)),
        "calls": round(len(rows) / len(str(rows["ranks"].iloc[0]).split())),
        "rows": got["rows"].sum(),
        "busiest": busiest,
        "busiest_rows": got["rows"].max(),
        "busiest_bytes": round(got["bytes"].to_dict()[busiest]),
        "balance": got["rows"].max() / got["rows"].mean() if got["rows"].sum() else 1.0,
        "worst": (one.max() / one.mean()).max(),
    }


def steps_by_rank(run: Run) -> pd.DataFrame:
    """step, rank, start_us, step_us (from its first forward to that of the next step, else to its last update),
    microbatches.
    """
    frame = join_ranks(run.path, "steps.csv", STEP_TYPES, [])
    frame = frame.sort_values(["rank", "step"], ignore_index=True)
    after = frame.groupby("rank")["step"].shift(-1).eq(frame["step"] + 1)
    ends = frame.groupby("rank")["start_us"].shift(-1).where(after, frame["updated_us"].astype("float64"))
    taken = ends - frame["start_us"]
    return frame.assign(step_us=taken.where(taken > 0))[["step", "rank", "start_us", "step_us", "microbatches"]]


def by_rank(run: Run) -> pd.DataFrame:
    """Figures by rank.

    rank, calls, send and recv (those among them), async_calls (whose duration is not known), wire_bytes, exposed_us
    (inside calls that are waited for at once). late_us and latest are the median lateness behind the first rank of the
    group, and the share of calls in which it came last. Both are NaN where clocks differ, but for traces: see
    `_lateness_by_rank`. host_bytes and device_bytes are peaks of the process.
    """
    events = run.ledger
    one = events.groupby("rank", observed=True)
    frame = one.agg(
        calls=("op", "size"),
        async_calls=("is_async", "sum"),
        wire_bytes=("wire_bytes", total),
        exposed_us=("duration_us", _known_total),
    )
    for op in _MESSAGES:
        frame[op] = (events["op"] == op).groupby(events["rank"], observed=True).sum()
    late = _lateness_by_rank(run)
    frame["late_us"] = late["late_us"].groupby(late["rank"]).median() if len(late) else float("nan")
    frame["latest"] = late["last"].groupby(late["rank"]).mean() if len(late) else float("nan")
    over = ends_of(run.path)
    for name in ("host_bytes", "device_bytes"):
        frame[name] = pd.array([over.get(int(rank), {}).get(f"peak_{name}") or pd.NA for rank in frame.index], "Int64")
    return frame.reset_index()


def _lateness_by_rank(run: Run) -> pd.DataFrame:
    """rank, late_us, last: of every collective that all ranks of its group issued, if all have one clock.

    A kernel waits for the last rank, and all end together. So in traces a rank is late by the time by which its kernel
    is shorter than the longest one, on any clocks.
    """
    clocks = {str(about.get("clock")) for about in about_ranks(run.path).values()}
    events, traced = add_group_ranks(run), is_traced(run)
    events = events[~events["op"].isin(_MESSAGES) & (events["group_size"] > 1) & (events["ranks"] != "")]
    if traced:
        events = events[events["duration_us"].notna()]
    if (len(clocks) != 1 and not traced) or not len(events):
        return pd.DataFrame({"rank": [], "late_us": [], "last": []})
    keys = ["axis", "ranks", "step"]
    events = events.assign(
        number=events.groupby([*keys, "rank"], observed=True).cumcount(),
        begin=-events["duration_us"] if traced else events["start_us"],
    )
    calls = events.groupby([*keys, "number"], observed=True)
    whole = calls["rank"].transform("size") == events["group_size"]
    late = events["begin"] - calls["begin"].transform("min")
    last = events["begin"] == calls["begin"].transform("max")
    return pd.DataFrame({"rank": events["rank"], "late_us": late, "last": last.astype("float64")})[whole]


def is_traced(run: Run) -> bool:
    """Whether the run was read from traces."""
    return "source" in run.env


def device_steps(run: Run) -> pd.DataFrame:
    """rank, step, device_us, compute_us, communication_us, exposed_us (it only communicated), share (of
    the step that is exposed): of each step of a trace with kernels.
    """
    frame = join_ranks(run.path, "device.csv", DEVICE_TYPES, [])
    frame = frame.sort_values(["rank", "step"], ignore_index=True)
    names = ["rank", "step", "device_us", "compute_us", "communication_us", "exposed_us"]
    return frame[names].assign(share=frame["exposed_us"] / frame["device_us"])


def on_device(run: Run) -> pd.DataFrame:
    """The medians of `device_steps` over the steps of a rank, and the number of these `steps`."""
    frame = device_steps(run).assign(steps=1)
    times = ("device_us", "compute_us", "communication_us", "exposed_us", "share")
    return frame.groupby("rank").agg({"steps": "sum"} | dict.fromkeys(times, "median")).reset_index()


def largest_payloads(run: Run, number: int = 3) -> pd.DataFrame:
    """The places with the largest payloads: op, axis, payload_bytes, calls (of the rank that has most), phase, region,
    caller.
    """
    events = run.ledger[run.ledger["payload_bytes"].notna()]
    places = ["op", "axis", "payload_bytes", "phase", "region", "caller"]
    calls = events.groupby([*places, "rank"], observed=True).size().groupby(places, observed=True).max()
    frame = calls.rename("calls").reset_index()
    return frame.sort_values(["payload_bytes", "calls"], ascending=False, kind="stable").head(number)


def add_group_ranks(run: Run) -> pd.DataFrame:
    """The ledger with the ranks of every call's group, "" unless exactly one group of its axis is known."""
    groups = join_ranks(run.path, "groups.csv", GROUP_TYPES, [])
    single = groups[~groups.duplicated(["rank", "axis"], keep=False)]
    known = {(rank, axis): ranks for rank, axis, ranks in single[["rank", "axis", "ranks"]].itertuples(index=False)}
    events = run.ledger.astype({"axis": "str", "op": "str", "phase": "str", "mode": "str"})
    ranks = [known.get(pair, "") for pair in zip(events["rank"], events["axis"], strict=True)]
    return events.assign(ranks=ranks)


def list_findings(run: Run) -> list[str]:
    """Findings in sentences: broken laws, calls that move nothing, steps or micro-batches that differ."""
    if run.ledger.empty:
        return ["no call was recorded"]
    return [
        *_broken_laws(run),
        *_find_unwaited_calls(run),
        *_idle_calls(run),
        *find_unlike_steps(run, "step"),
        *find_unlike_steps(run, "microbatch"),
    ]


def _broken_laws(run: Run) -> Iterator[str]:
    sizes = [int(size) for size in run.cases["world_size"].dropna()]
    if set(ends_of(run.path)) != set(range(max(sizes, default=0))):
        missing = "has a trace" if is_traced(run) else "came to its end"
        yield f"laws: not looked at, since not every rank {missing}"
        return
    if lost := [rank for rank, end in ends_of(run.path).items() if end.get("lost")]:
        which = f"the first calls of {name_ranks(lost)} are lost"
        yield f"laws: not looked at, since {which} (shardproof hang compares by number)"
        return
    events = add_group_ranks(run)
    events = events[events["ranks"] != ""]
    if is_traced(run):
        events = events[events["step"].isin(_common_steps(run))]
    if events.empty:
        yield "laws: not looked at, since no rank's calls in a step that all have are of a known group"
        return
    counts = events.groupby("step").size().cumsum()
    within = [int(step) for step in counts.index[(counts <= _MOST_LAWFUL) | (counts.index == counts.index.min())]]
    whole = tuple(list_events(events[events["step"].isin(within)]))
    which = f"steps {format_span(within)}"
    broken = broken_laws(whole)
    if not broken:
        yield f"laws: the ranks of every group issue the same calls, and what is sent is received ({which})"
    for one in broken[:5]:
        yield f"broken law: {one.fact.text}"
    if len(broken) > 5:
        yield f"broken laws: {len(broken) - 5} more ({which})"


def _common_steps(run: Run) -> set[int]:
    """The steps that the traces of all ranks have, since the profiler may be on at other times on each."""
    own = [set(numbers) for _, numbers in steps_by_rank(run).groupby("rank")["step"]]
    return set.intersection(*own) if own else set()


def _find_unwaited_calls(run: Run) -> Iterator[str]:
    """Asynchronous calls whose handle was dropped before anything waited for it, by place."""
    found: dict[tuple[str, str, str], dict[int, int]] = {}
    for rank, end in ends_of(run.path).items():
        for op, axis, caller, number in end.get("unwaited") or ():
            found.setdefault((op, axis, caller), {})[rank] = number
    for (op, axis, caller), numbers in found.items():
        calls = f"{max(numbers.values())} asynchronous {op} over {axis} at {caller or '?'}"
        yield f"{calls}: never waited for, its handle was dropped (ranks {ranks_text(list(numbers))})"


def list_events(frame: pd.DataFrame) -> Iterator[Event]:
    """Rows of `add_group_ranks` whose group is known, as events of the ledger."""
    names = [name for name in Event.__annotations__ if name in frame]
    for row in frame[[*names, "ranks"]].to_dict("records"):
        ranks = tuple(int(rank) for rank in str(row.pop("ranks")).split())
        words: dict[str, Any] = {str(name): value for name, value in row.items()}
        yield Event(**words, group=ranks)


def _idle_calls(run: Run) -> Iterator[str]:
    """Calls that move nothing: in a group of one rank, or without bytes."""
    events = run.ledger
    for words, rows in (
        ("in groups of one rank", events[events["group_size"] == 1]),
        ("of no bytes", events[(events["payload_bytes"] == 0) & (events["op"] != "barrier")]),
    ):
        if len(rows):
            most = rows.groupby("rank").size().max()
            place = Counter(str(place) for place in rows["caller"]).most_common(1)[0][0] or "?"
            yield f"{most} calls of a rank are {words}: they move nothing; most at {place}"
