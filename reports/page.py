"""One run as one HTML page: self-contained, opens offline, under a megabyte.

Everything that comes from a run is escaped by the template; only our own drawings are trusted. What would not fit is
left out with a line that says where it stands in the run folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from reports import breakeven, plots, summary, tables, witnesses
from reports.frames import Run
from reports.tables import Table

__all__ = ["render", "write"]

_MOST_ROWS = 1000
_MOST_MESSAGES = 50
_MOST_CASES = 24
_TEMPLATES = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plot:
    svg: Markup
    caption: str


def write(run: Run, path: Path) -> Path:
    """Write the page of this run to a file and return its path."""
    path.write_text(render(run), encoding="utf-8")
    return path


def render(run: Run) -> str:
    """The page as text."""
    headline = summary.headline(run)
    verdicts = summary.worst_first(run.verdicts)
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html").render(
        name=run.path.resolve().name,
        overall=summary.overall(headline),
        tally=_tally(headline),
        notes=run.notes,
        headline=tables.headline_table(headline),
        failures=_failures(verdicts),
        more_failures=max(0, len(_told(verdicts)) - _MOST_MESSAGES),
        plots=_plots(run),
        traffic=[*_traffic(run), *witnesses.tables(run.path)],
        cases=_cases(run),
        verdicts=_first_rows(tables.verdict_table(verdicts), "verdicts.jsonl"),
        break_even=_break_even_table(run),
        environment=_environment(run.env),
    )


def _tally(headline: pd.DataFrame) -> str:
    """ "17 pass, 1 fail"."""
    counts = headline["verdict"].value_counts()
    words = sorted(counts.index, key=summary.badness)
    return ", ".join(f"{counts[word]} {word}" for word in words) or "no case"


def _told(verdicts: pd.DataFrame) -> pd.DataFrame:
    return verdicts[verdicts["verdict"].isin(["fail", "unknown"]) & (verdicts["message"] != "")]


def _failures(verdicts: pd.DataFrame) -> list[dict[str, str]]:
    rows = _told(verdicts)[["check", "verdict", "case", "message"]].head(_MOST_MESSAGES)
    return [{str(key): str(value) for key, value in row.items()} for row in rows.to_dict("records")]


def _plots(run: Run) -> list[_Plot]:
    drawn = []
    bars = summary.bars(run)
    if len(bars):
        svg = plots.traffic_bars(bars, "Bytes by mode and phase")
        drawn.append(_Plot(svg=Markup(svg), caption="Payload that one rank sends over the whole run, by phase."))
    growth = breakeven.growth(run)
    if len(growth):
        svg = plots.break_even(growth, breakeven.crossings(growth), "Bytes against tokens")
        caption = "Wire bytes of one rank in the layers, a micro-batch; all-to-alls, embedding and head left out."
        drawn.append(_Plot(svg=Markup(svg), caption=caption))
    return drawn


def _break_even_table(run: Run) -> Table | None:
    crossings = breakeven.compared(run)
    return tables.break_even_table(crossings) if len(crossings) else None


def _traffic(run: Run) -> list[Table]:
    """One table a mode: its calls and bytes beside the expectation."""
    traffic = summary.traffic(run)
    modes = traffic.groupby("mode", observed=True, sort=True)
    return [tables.traffic_table(lines, title=str(mode)) for mode, lines in modes]


def _cases(run: Run) -> list[Table]:
    """One table a case, when there are few enough to read."""
    if run.summary["case"].nunique() > _MOST_CASES:
        return []
    cases = summary.traffic(run, "case").groupby("case", sort=False)
    return [_first_rows(tables.traffic_table(lines, title=str(case)), "summary.csv") for case, lines in cases]


def _first_rows(table: Table, source: str) -> Table:
    if len(table.rows) <= _MOST_ROWS:
        return table
    note = f"{_MOST_ROWS:,} of {len(table.rows):,} rows; all of them stand in {source}"
    return Table(
        title=table.title, headers=table.headers, rows=table.rows[:_MOST_ROWS], numbers=table.numbers, note=note
    )


def _environment(env: dict[str, Any]) -> Table:
    return Table(title="Environment", headers=("what", "value"), rows=tuple(_flat("", env)))


def _flat(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
