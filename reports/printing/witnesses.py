"""Tables of what the witnesses of a profiled run saw: what each says of the events, and the time of collectives.

From witnesses.csv, collectives.csv and sessions.csv of the run folder, which only `--profile` makes. Times are seconds
in sessions.csv, microseconds in collectives.csv, milliseconds in tables; an interval holds the median in 95 of 100
samples.
"""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from shardproof.harness.witnesses.spread import spread
from shardproof.reports.printing.text_tables import NOTHING, Table, count

WITNESSES = ("ledger", "recorder", "torch", "nsys", "closed_form")
_GROUP = ["case", "phase", "op", "group_size"]


def witness_tables(folder: Path) -> Iterator[Table]:
    """The tables for which the folder has files; none for a run that was not profiled."""
    seen, sessions = _read_table(folder / "witnesses.csv"), _read_table(folder / "sessions.csv")
    steps = _words_of_steps(sessions)
    if len(seen):
        yield _agreement_table(seen, steps)
    times = _read_table(folder / "collectives.csv")
    if len(times):
        yield _times_table(times)
    if len(sessions):
        yield _sessions_table(sessions, steps)


def _read_table(path: Path) -> pd.DataFrame:
    if not path.exists():
        return pd.DataFrame()
    return pd.read_csv(path, dtype={"group": str, "region": str, "steps": str}, keep_default_na=False)


def _words_of_steps(sessions: pd.DataFrame) -> str:
    """The steps that were watched, in words."""
    steps = str(sessions["steps"].iloc[0]) if len(sessions) else ""
    return f"steps {steps} of every run" if steps else "whole runs"


def _agreement_table(seen: pd.DataFrame, steps: str) -> Table:
    """How many events each witness confirms, by case and phase. A number smaller than the first is a disagreement."""
    rows = []
    for case, of_case in seen.groupby("case", sort=False):
        for phase, part in of_case.groupby("phase", sort=False):
            rows.append((str(case), str(phase) or NOTHING, *(_count_confirmed(part[name]) for name in WITNESSES)))
        rows.append((str(case), "all", *(_count_confirmed(of_case[name]) for name in WITNESSES)))
    return Table(
        title="Events that each witness confirms",
        headers=("case", "phase", *(name.replace("_", " ") for name in WITNESSES)),
        rows=tuple(rows),
        numbers=frozenset(range(2, 2 + len(WITNESSES))),
        note=f"{steps}, all ranks; {NOTHING}: not asked; every event side by side is in witnesses.csv",
    )


def _count_confirmed(words: pd.Series) -> str:
    asked = words[words != NOTHING]
    return count(int((asked == "=").sum())) if len(asked) else NOTHING


def _times_table(times: pd.DataFrame) -> Table:
    """Duration, exposed part and lateness of collectives by case, phase, op and size of group."""
    times = times.assign(group_size=times["group"].str.count(",") + 1)
    rows = []
    for key, part in times.groupby(_GROUP, sort=False):
        case, phase, op, size = key if isinstance(key, tuple) else (key,) * 4
        duration = spread([float(value) for value in part["duration_us"]])
        exposed = float(part["exposed_us"].sum()) / max(float(part["duration_us"].sum()), 1e-9)
        late = float(part.groupby("rank")["late_us"].median().max())
        interval = f"{duration.median / 1e3:.3f} ({duration.low / 1e3:.3f} to {duration.high / 1e3:.3f})"
        rows.append(
            (
                str(case),
                str(phase),
                str(op),
                str(size),
                count(len(part)),
                interval,
                f"{exposed:.0%}",
                f"{late / 1e3:.3f}",
            )
        )
    return Table(
        title="What collectives cost in time, as the torch profiler saw it",
        headers=("case", "phase", "op", "ranks", "calls", "ms each (95%)", "exposed", "latest rank, ms"),
        rows=tuple(rows),
        numbers=frozenset(range(3, 8)),
        note="exposed: what no compute of the rank hides; latest rank: how long after the first, median of its calls",
    )


def _sessions_table(sessions: pd.DataFrame, steps: str) -> Table:
    rows = []
    for (case, tool), part in sessions.groupby(["case", "tool"], sort=False):
        slowest = part.sort_values("median_s").iloc[-1]
        interval = f"{slowest['median_s'] * 1e3:.1f} ({slowest['low_s'] * 1e3:.1f} to {slowest['high_s'] * 1e3:.1f})"
        apart = (part["median_s"].max() - part["median_s"].min()) * 1e3
        watched = part["watched_s"].max() * 1e3
        peak = part["peak_bytes"].max() / 2**20
        cells = (interval, f"{apart:.1f}", f"{watched:.1f}", f"{peak:.0f}")
        rows.append((str(case), str(tool), count(slowest["runs"]), *cells))
    return Table(
        title="Runs of a case on processes, in ms",
        headers=("case", "session", "runs", "unwatched", "ranks apart", "watched", "peak MiB"),
        rows=tuple(rows),
        numbers=frozenset(range(2, 7)),
        note=f"{steps}; slowest rank; unwatched: median (interval) after warm-up; peak: of the process, torch too",
    )
