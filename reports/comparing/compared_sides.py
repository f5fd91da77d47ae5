"""Input of a comparison, read without pandas: its two sides by name, and `--fail WHAT:LIMIT`.

events:0    no event is new, gone or changed        calls:0  bytes:0    exactly the same calls, bytes at every place
calls:N  bytes:N  calls:P%  bytes:P%                may grow by that much on the busiest rank of a case
memory:N  memory:P%                                 what autograd holds may grow by that much
time:P%     no phase is slower by more, beside the other phases of its run (reports.comparing.intervals)
wall:P%     no phase is slower by more as the clock says, however busy the machine was

A phase breaks its limit P if its ratio is above 1 + P, and the low end of the interval of the ratio is above 1.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.harness.errors import RequestError
from shardproof.harness.traces.files import SUFFIXES
from shardproof.reports.stored.files import RunFolderError, guard_looking, refuse_file, run_folder, shorten_path

if TYPE_CHECKING:
    import pandas as pd

_COUNTED = ("events", "calls", "bytes", "memory")
_TIMED = ("time", "wall")
_LEGAL = "legal: bytes:0, calls:0, events:0, memory:5%, time:10%, wall:10%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The amount by which `what` may exceed the base: a number, or if `relative` a share of the base (0.1 is 10 %)."""

    what: str
    amount: float
    relative: bool = False

    def __str__(self) -> str:
        return f"{self.what}:{self.amount * 100:g}%" if self.relative else f"{self.what}:{self.amount:g}"

    def is_exceeded(self, base: float, new: float) -> bool:
        """Is `new` further above `base` than it may be?"""
        return new - base > (self.amount * base if self.relative else self.amount)


EXACT = (Limit(what="events", amount=0),)
"""Limits unless others are named: the same events, thus the same calls and bytes."""


def parse_limits(texts: Sequence[str]) -> tuple[Limit, ...]:
    """The limits of these texts; EXACT when there is none. Raises RequestError for a text that is no limit."""
    return tuple(_parse_limit(text) for text in texts) or EXACT


def _parse_limit(text: str) -> Limit:
    what, colon, amount = text.partition(":")
    number = amount.removesuffix("%")
    if not colon or what not in (*_COUNTED, *_TIMED):
        raise RequestError(f"fail={text}: must be WHAT:LIMIT with one of {', '.join((*_COUNTED, *_TIMED))}; {_LEGAL}")
    if not number.replace(".", "", 1).isdecimal():
        raise RequestError(f"fail={text}: the limit must be a number or a percentage, not negative; {_LEGAL}")
    relative = amount.endswith("%")
    if what in _TIMED and not relative or what == "events" and float(number) > 0:
        rule = "times differ in every run, so their limit is a percentage" if what in _TIMED else "must be 0"
        raise RequestError(f"fail={text}: {rule}; {_LEGAL}")
    return Limit(what=what, amount=float(number) / (100 if relative else 1), relative=relative)


def describe_breaches(
    asked: Iterable[Limit], events: "pd.DataFrame", sizes: "pd.DataFrame", memory: "pd.DataFrame", times: "pd.DataFrame"
) -> tuple[str, ...]:
    """A sentence for each place at which a limit is broken.

    `events`: of `differences.fold_changes`; `sizes`: case, calls, new_calls, payload_bytes, new_payload_bytes;
    `memory`: case, saved_bytes, new_saved_bytes; `times`: of `intervals.phase_times`.
    """
    return tuple(
        f"{limit}: {where}" for limit in asked for where in _find_breaches(limit, events, sizes, memory, times)
    )


def _find_breaches(
    limit: Limit, events: "pd.DataFrame", sizes: "pd.DataFrame", memory: "pd.DataFrame", times: "pd.DataFrame"
) -> Iterator[str]:
    if limit.what in _TIMED:
        yield from _find_slowdown(limit, times)
    elif limit.what == "memory":
        yield from _find_growth(limit, memory, "saved_bytes", "saved bytes")
    elif limit.amount:
        column = {"calls": "calls", "bytes": "payload_bytes"}[limit.what]
        yield from _find_growth(limit, sizes, column, limit.what)
    else:
        yield from _find_any_change(limit.what, events)


def _find_any_change(what: str, events: "pd.DataFrame") -> Iterator[str]:
    apart = {
        "events": events["kind"] != "",
        "calls": events["base_calls"] != events["new_calls"],
        "bytes": events["base_payload_bytes"] != events["new_payload_bytes"],
    }[what] | (events["kind"] == "moved")  # what is summed in another micro-batch may be summed too early
    for row in events[apart].to_dict("records"):
        times = f" x {row['modules']}" if row["modules"] > 1 else ""
        place = f"{row['mode']} {row['phase']} {row['region'] or 'outside modules'}{times}"
        column = {"events": "", "calls": "calls", "bytes": "payload_bytes"}[what]
        amounts = f" ({row[f'base_{column}']:,} -> {row[f'new_{column}']:,} {what})" if column else ""
        yield f"{place}: {row['kind']} {row['op']}{amounts}: {row['what']}"


def _find_growth(limit: Limit, frame: "pd.DataFrame", column: str, unit: str) -> Iterator[str]:
    for row in frame.to_dict("records"):
        if limit.is_exceeded(row[column], row[f"new_{column}"]):
            yield f"{row['case']}: {row[column]:,} -> {row[f'new_{column}']:,} {unit} on the busiest rank"


def _find_slowdown(limit: Limit, times: "pd.DataFrame") -> Iterator[str]:
    ratio, low = ("ratio", "low") if limit.what == "time" else ("clock_ratio", "clock_low")
    # If both measures are slow, "elapsed" comes first: it names the module. Time in calls includes waiting for others.
    slow = times[(times[ratio] > 1 + limit.amount) & (times[low] > 1)].sort_values("measure", kind="stable")
    for row in slow.drop_duplicates(["mode", "phase"]).to_dict("records"):
        beside = f" beside {row['beside']}" if limit.what == "time" and row["beside"] else ""
        mostly = f", mostly in {row['mostly']}" if row["mostly"] else ""
        yield f"{row['mode']} {row['phase']}: {row[ratio]:.2f} times as slow ({row['measure']}){beside}{mostly}"


FOLDER = "baselines"
MARK = "baseline.json"
"""The file that makes a folder a baseline, written last."""


def is_trace(name: str) -> bool:
    """Whether the name of a side is a trace file that lies outside of run folders."""
    with guard_looking(name):
        in_a_run = (Path(name).parent / "env.json").is_file()
        return name.endswith(SUFFIXES) and Path(name).is_file() and not in_a_run


def side_folder(name: str, folder: str = FOLDER) -> Path:
    """The run folder or baseline of this path, or the baseline of this name in a folder of baselines.

    Raises RunFolderError when there is none, naming the baselines that there are.
    """
    path, stored = Path(name), Path(folder) / name
    with guard_looking(name):
        if not path.is_dir() and _is_legal_name(name) and (stored / MARK).is_file():
            path = stored
        there, kept = path.is_dir(), (path / MARK).is_file()
        refuse_file(path)
    if kept:
        return path
    if there:
        return run_folder(path, matrix=False)
    known = sorted(found.parent.name for found in Path(folder).glob(f"*/{MARK}"))
    legal = f"a run folder, such as runs/latest, or a baseline in {folder}/: {', '.join(known) or 'it holds none yet'}"
    raise RunFolderError(f"run {shorten_path(name)}: no such run folder and no baseline of this name; legal: {legal}")


def check_name(name: str) -> None:
    """Raise RequestError unless a baseline may have this name."""
    if not _is_legal_name(name):
        rule = "must be a name of at most 100 letters, digits, dots, dashes and underscores, the first none of .-"
        raise RequestError(f"baseline={shorten_path(name)}: {rule}; legal: main")


def _is_legal_name(name: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name))
