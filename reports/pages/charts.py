"""Charts of a page: rows of bars beside each other, each column on one scale, with the number above its bar.

Modes on one model: what one rank sends by phase, its calls, and what it saves for backward. Two sides of a comparison:
payload and calls of the base beside those of the new one, by phase and by op. A bar stretches with its cell, so a chart
fits any screen.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
from markupsafe import Markup

from shardproof.harness.ledger import OPS
from shardproof.reports.comparing.comparison import Comparison
from shardproof.reports.pages.drawings import PHASE_COLOURS, SAVED, Part, draw_bar
from shardproof.reports.printing.run_tables import WITH_MODE
from shardproof.reports.printing.text_tables import byte_size, count
from shardproof.reports.stored.frames import Run
from shardproof.reports.stored.summary import words_but

_OP_COLOURS = dict(zip((*OPS, "?"), ("#3b82c4 #e08a2e #2a9d6f #8e6bbf #d1495b #a1785a #2fa7b5 #6d6875 #b8b8b8 "
                                     "#5b5f97 #8d99ae #7a8450 #b5651d").split(), strict=False))  # fmt: skip
_CALLS = "#6d6875"
_MOST_MODELS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartCell:
    """A number as text, and its bar."""

    text: str
    bar: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart: its title, colours of the parts of its bars, headers (the first of the labels), rows, a note."""

    title: str
    legend: tuple[tuple[str, str], ...]
    headers: tuple[str, ...]
    rows: tuple[tuple[str, tuple[ChartCell, ...]], ...]
    note: str = ""


_Column = tuple[str, Sequence[Sequence[Part]], Callable[[object], str]]
"""What a column measures, the parts of the bar of each row, and how its numbers are written."""


def _draw_columns(columns: Sequence[_Column], scale: str = "") -> list[list[ChartCell]]:
    """Cells by column. With a `scale`, columns whose names agree up to the comma share one."""
    full: defaultdict[str, float] = defaultdict(float)
    for what, bars, _ in columns:
        key = what.partition(",")[0] if scale else what
        full[key] = max(full[key], *(sum(size for _, size, _ in parts) for parts in bars))
    return [
        [
            ChartCell(
                text=write(sum(size for _, size, _ in parts)),
                bar=draw_bar(parts, full[what.partition(",")[0] if scale else what], what, write),
            )
            for parts in bars
        ]
        for what, bars, write in columns
    ]


def chart_models(run: Run) -> list[Chart]:
    """A chart for each model that several modes ran on as many ranks, those with the most cases first."""
    models: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for case, mode, ranks in run.cases[["case", "mode", "world_size"]].dropna().itertuples(index=False, name=None):
        models.setdefault((words_but(case, *WITH_MODE), int(ranks)), []).append((str(mode), str(case)))
    several = {model: own for model, own in models.items() if len({mode for mode, _ in own}) > 1}
    ordered = sorted(several.items(), key=lambda model: -len(model[1]))
    return [_chart_model(run, *model, own) for model, own in ordered[:_MOST_MODELS]]


def _chart_model(run: Run, words: str, ranks: int, own: Sequence[tuple[str, str]]) -> Chart:
    lines = run.summary[run.summary["case"].isin([case for _, case in own])]
    sent: dict[tuple[str, str], float] = {}
    for case, phase, size in lines[["case", "phase", "wire_bytes"]].dropna().itertuples(index=False, name=None):
        sent[case, str(phase)] = sent.get((case, str(phase)), 0.0) + float(size)
    calls, saved = lines.groupby("case")["calls"].sum(), run.memory.groupby("case")["saved_bytes"].max()
    order = [case for case in run.cases.sort_values("mode", kind="stable")["case"] if case in {one for _, one in own}]
    labels = dict((case, mode) for mode, case in own)
    repeated = len(set(labels.values())) < len(labels)
    columns: list[_Column] = [
        (
            "bytes sent by phase",
            [[(p, sent[case, p], c) for p, c in PHASE_COLOURS.items() if sent.get((case, p))] for case in order],
            byte_size,
        ),
        ("calls", [[("calls", float(calls.get(case, 0)), _CALLS)] for case in order], count_whole),
    ]
    if len(saved):
        columns.append(("memory saved", [[("saved", float(saved.get(case, 0)), SAVED)] for case in order], byte_size))
    drawn = _draw_columns(columns)
    used = {phase for (_, phase), size in sent.items() if size}
    return Chart(
        title=f"{words or 'the default case'}, {ranks} rank{'s' if ranks != 1 else ''}",
        legend=tuple((phase, colour) for phase, colour in PHASE_COLOURS.items() if phase in used),
        headers=("mode", *(what for what, *_ in columns)),
        rows=tuple(
            (case if repeated else labels[case], tuple(column[place] for column in drawn))
            for place, case in enumerate(order)
        ),
        note="one rank, the busiest, over the whole run; bytes sent: ring model; saved: the most that autograd held",
    )


def count_whole(value: object) -> str:
    """A whole number as text. pandas may have added it up as a float."""
    return count(int(float(str(value))))


def chart_comparison(comparison: Comparison) -> Iterator[tuple[str, list[Chart]]]:
    """By mode, both sides of a comparison by phase and by op."""
    frame = comparison.by_op.astype({"mode": "str", "phase": "str", "op": "str"})
    for mode, lines in frame.groupby("mode", sort=False):
        yield (
            str(mode),
            [_chart_sides(lines, "phase", "op", _OP_COLOURS), _chart_sides(lines, "op", "phase", PHASE_COLOURS)],
        )


_UNNAMED = "#b8b8b8"


def _chart_sides(lines: pd.DataFrame, by: str, part: str, colours: dict[str, str]) -> Chart:
    """Payload and calls of both sides by this column, with parts by the other one."""
    rows = list(dict.fromkeys(lines[by]))

    def parts_of(name: str) -> list[list[Part]]:
        own = lines.assign(size=lines[name].fillna(0).astype("float64"))
        return [
            [
                (key, size, colours.get(key, _UNNAMED))
                for key, size in own[own[by] == row].groupby(part, sort=False)["size"].sum().items()
                if size
            ]
            for row in rows
        ]

    columns: list[_Column] = [
        ("payload, base", parts_of("payload_bytes"), byte_size),
        ("payload, now", parts_of("new_payload_bytes"), byte_size),
        ("calls, base", parts_of("calls"), count_whole),
        ("calls, now", parts_of("new_calls"), count_whole),
    ]
    drawn = _draw_columns(columns, "shared")
    return Chart(
        title=f"by {by}",
        legend=tuple((key, colours.get(key, _UNNAMED)) for key in dict.fromkeys(lines[part])),
        headers=(by, *(what for what, *_ in columns)),
        rows=tuple((row, tuple(column[place] for column in drawn)) for place, row in enumerate(rows)),
        note="one rank, cases added up; base and now on one scale",
    )
