"""A run as one HTML page: self-contained, opens offline, as a rule under two megabytes.

Everything that comes from a run is escaped by the template; only our own drawings are trusted. Tables that would make
the page larger are cut, with a line that says which file of the run folder has all of their rows.
"""

import itertools
import json
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from shardproof.harness.dense_model import SUBJECT, read_case
from shardproof.harness.resolve import resolve
from shardproof.harness.verdicts.verdict import UNKNOWN
from shardproof.reports.pages import drawings, opening, plots
from shardproof.reports.pages.charts import chart_models
from shardproof.reports.pages.drawings import Node, build_tree, by_module, draw_timeline, last_micro_batch
from shardproof.reports.pages.plots import draw_pictures
from shardproof.reports.pages.templates import template_of
from shardproof.reports.printing import text_tables
from shardproof.reports.printing.run_tables import (
    break_even_table,
    calls_table,
    compare_modes,
    expert_tables,
    find_crossings,
    growth_of_bytes,
)
from shardproof.reports.printing.text_tables import Table
from shardproof.reports.printing.witnesses import witness_tables
from shardproof.reports.stored import summary
from shardproof.reports.stored.failures import open_checks
from shardproof.reports.stored.frames import Run, csv_table
from shardproof.reports.stored.unchecked import unchecked_notes

_MOST_BYTES = 2_000_000
_MOST_ROWS = (1000, 300, 100, 30)
_MOST_MESSAGES = 30
_FEWEST_OF_GROWTH = 4
"""Two modes at two sizes each are at least this many cases."""
_MOST_CASES = 64
_MOST_PIPELINES, _MOST_DRAWN = 4, 16
"""The most pipelines with a picture of their own, and the most ranks in it."""
_SOURCES = {"cases": "summary.csv", "verdicts": "verdicts.jsonl", "kills": "kill_matrix.csv"}
"""Tables that may be cut, and the files that have all of their rows."""
_TURNS = "inproc"
"""The engine whose ranks take turns, so that its times say nothing about speed."""
_WORDS = {
    "payload": "all_reduce: the tensor; all_gather: the gathered output; reduce_scatter: the full input; all_to_all: "
    "what one rank sends",
    "wire": "ring model, a rank: all_reduce 2(p-1)/p of the payload; all_gather, reduce_scatter, all_to_all (p-1)/p; "
    "groups of one: nothing",
    "expected": "the closed form of the mode, from formulas alone; - where the subject gives none",
    "saved": "the most bytes that autograd held for backward on a rank",
    "exposed": "time inside calls that are waited for at once, so that the rank does not compute",
    "allowed": "how far a right result may be from the dense model, from dtype and depth; exact checks allow 0",
    "decided": "tensors whose limit is small enough to judge, of those that the case has",
    "verdict": "pass, fail, or unknown: a check that could not be answered is never a pass",
}
"""Meanings of column headers."""

_KILL_COLUMNS = {
    **{"name": "bug", "kind": "kind", "stands_for": "stands for", "mode": "mode", "phase": "phase"},
    **{"region": "module", "survived": "noticed", "killed_by": "by", "equivalent": "equivalent"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plot:
    svg: Markup
    caption: str


def write_page(run: Run, path: Path) -> Path:
    """Write the page of this run to a file and return its path."""
    path.write_text(render_page(run), encoding="utf-8")
    return path


def render_page(run: Run) -> str:
    """The page as text, with as many rows of every table as keep it small."""
    template, parts = template_of("page.html"), _parts_of_template(run)
    for rows in _MOST_ROWS:
        shown = parts | {name: _cut_tables(parts[name], source, rows) for name, source in _SOURCES.items()}
        # A name may hold characters that UTF-8 cannot encode.
        encoded = template.render(shown, most=rows).encode("utf-8", "backslashreplace")
        if len(encoded) <= _MOST_BYTES:
            break
    return encoded.decode()


def _cut_tables(part: object, source: str, rows: int) -> object:
    """A table, or several, with at most this many rows; None if there is none."""
    if isinstance(part, list):
        return [_cut_tables(table, source, rows) for table in part]
    if not isinstance(part, Table):
        return part
    return text_tables.shorten_table(part, rows, f"all of them stand in {source}")


def _parts_of_template(run: Run) -> dict[str, object]:
    """The values of the template, by its names for them."""
    headline = summary.headline(run)
    verdicts = summary.worst_first(run.verdicts)
    lines, shared = drawings.lines_of_cases(run, headline)
    used = set(run.summary.loc[run.summary["wire_bytes"].fillna(0).gt(0), "phase"])  # other tables have no bars
    program = opening.program_parts(run)
    return {
        "name": run.path.resolve().name,
        "program": program.get("program"),
        "findings": program.get("findings", []),
        "overall": summary.worst_verdict(headline),
        "tally": summary.tally_of_run(headline, run.records),
        "worst": int((headline["verdict"] == summary.worst_verdict(headline)).sum()),
        "strip": opening.opening_figures(run, headline),
        "proof": opening.describe_proof(run, headline),
        "models": [] if program else chart_models(run),
        "pairs": None if program else _pairs_table(run, headline),
        "words": _WORDS,
        "about": _about_run(run.env),
        "lines": lines,
        "shared": shared,
        "few": text_tables.MOST_CASES,
        "phases": [(phase, colour) for phase, colour in drawings.PHASE_COLOURS.items() if phase in used],
        "failures": opening.group_failures(run),
        "open": [one for one in open_checks(run.records) if one.verdict == UNKNOWN and any(one.lines)],
        "most_messages": _MOST_MESSAGES,
        "turns": run.env.get("request", {}).get("engine") == _TURNS,
        "notes": run.notes,
        "remarks": unchecked_notes(run),
        "command": _command_of_run(run.env),
        **_plot_growth(run),
        "pictures": list(draw_pictures(program["frames"])) if program.get("frames") else [],
        "launches": headline["against"].eq(summary.LAUNCH).all(),
        "traffic": program["traffic"] if program else [*_traffic_tables(run), *witness_tables(run.path)],
        "cases": [] if program else _case_tables(run),
        "stated": [] if program else _stated_calls(run),
        "experts": expert_tables(run.path),
        "modules": _module_trees(run),
        "pipelines": _plot_pipelines(run),
        "pipeline_table": text_tables.pipeline_table(summary.measure_pipelines(run), summary.cores_of_machine(run)),
        "timelines": _draw_timelines(run),
        "kills": _kill_table(run.path / "kill_matrix.csv"),
        "verdicts": text_tables.verdict_table(verdicts),
        "runs": None if program else opening.tabulate_runs(run),
        "environment": Table(title="Environment", headers=("what", "value"), rows=tuple(_flatten_values("", run.env))),
    }


def _about_run(env: dict[str, Any]) -> str:
    """Subject, engine and torch of a run, as far as they are known."""
    asked, versions = env.get("request", {}), env.get("versions", {})
    words = {"subject": asked.get("subject"), "engine": asked.get("engine"), "torch": versions.get("torch")}
    return ", ".join(f"{word} {value}" for word, value in words.items() if value)


def _plot_growth(run: Run) -> dict[str, object]:
    """Bytes against tokens, if a run has cases of several lengths."""
    if len(run.cases) < _FEWEST_OF_GROWTH:
        return {"plots": [], "break_even": None}
    sizes, crossed = growth_of_bytes(run), compare_modes(run)
    table = break_even_table(crossed) if len(crossed) else None
    if not len(sizes):
        return {"plots": [], "break_even": table}
    svg = plots.break_even(sizes, find_crossings(sizes), "Bytes against tokens")
    caption = "Wire bytes of one rank in the layers, a micro-batch; all-to-alls, embedding and head left out."
    return {"plots": [_Plot(svg=Markup(svg), caption=caption)], "break_even": table}


def _plot_pipelines(run: Run) -> list[_Plot]:
    """The last step of the first pipelines of a run on real processes."""
    drawn = dict(itertools.islice(summary.last_steps(run).items(), _MOST_PIPELINES))
    if not drawn:
        return []
    made = []
    for case, spans in drawn.items():
        shown = spans[spans["rank"].isin(sorted(spans["rank"].unique())[:_MOST_DRAWN])]
        start_us = shown["start_us"].min()
        seconds = {f"{end}_s": (shown[f"{end}_us"] - start_us) / 1e6 for end in ("start", "end")}
        svg = plots.plot_pipeline(shown.assign(**seconds), f"Last step of {case}")
        made.append(_Plot(svg=Markup(svg), caption=case))
    return made


def _command_of_run(env: dict[str, Any]) -> str:
    """The command line that made the run, in a form that can be typed again."""
    words = env.get("command", ())
    if isinstance(words, str):
        return words
    named = ["shardproof" if str(word).endswith("shardproof/__main__.py") else str(word) for word in words[:1]]
    return shlex.join([*named, *map(str, words[1:])])


def _module_trees(run: Run) -> list[tuple[str, tuple[Node, ...]]]:
    modes = by_module(run).groupby(["mode", "world_size"], observed=True, sort=True)
    return [(f"{mode}, {ranks} ranks", build_tree(lines)) for (mode, ranks), lines in modes]


def _draw_timelines(run: Run) -> list[_Plot]:
    """Drawings by mode, of its case with most ranks."""
    drawn = []
    cases = run.cases.sort_values("world_size", ascending=False, kind="stable")
    for mode, of_mode in cases.groupby("mode", observed=True, sort=True):
        case = str(of_mode["case"].iloc[0])
        svg = draw_timeline(last_micro_batch(run.ledger[run.ledger["case"] == case]), f"Timeline of {mode}")
        if svg:
            drawn.append(_Plot(svg=Markup(svg), caption=f"{mode}: the last micro-batch of {case}"))
    return drawn


def _kill_table(path: Path) -> Table | None:
    """The kill matrix of a folder of `shardproof faults`, with survivors first."""
    if not path.is_file():
        return None
    kills = csv_table(path, {}, ("name", "kind", "killed_by", "killed"), []).fillna("").astype("str")
    alive = kills["killed"].str.lower().isin(("false", "0", "no"))
    kills = kills.assign(survived=alive.map({True: "no", False: "yes"})).sort_values(
        "survived", kind="stable", ignore_index=True
    )
    columns = " | ".join(f"{header}: {name}" for name, header in _KILL_COLUMNS.items() if name in kills)
    killed = f"{(~alive).sum()} of {len(kills)} planted bugs were noticed"
    return text_tables.table("Kill matrix", kills, (text_tables.mark, columns), note=killed)


def _traffic_tables(run: Run) -> list[Table]:
    """Tables by mode, its calls and bytes beside the expectation."""
    modes = summary.traffic(run).groupby("mode", observed=True, sort=True)
    return [text_tables.traffic_table(lines, title=str(mode)) for mode, lines in modes]


def _case_tables(run: Run) -> list[Table]:
    """Tables by case, when there are few enough to read."""
    if run.summary["case"].nunique() > _MOST_CASES:
        return []
    cases = summary.traffic(run, "case").groupby("case", sort=False)
    return [text_tables.traffic_table(lines, title=str(case)) for case, lines in cases]


def _stated_calls(run: Run) -> list[Table]:
    """The calls of the first case of every mode, each with its reason; only for our own subject."""
    if run.env.get("request", {}).get("subject") != SUBJECT:
        return []
    ours: Any = resolve(SUBJECT)
    firsts = [read_case(str(text)) for text in run.cases.drop_duplicates("mode")["case"]]
    return [calls_table(str(case), ours.expected(case)) for case in firsts]


def _pairs_table(run: Run, headline: pd.DataFrame) -> Table | None:
    """The pairs of features that passed together; None for every subject but ours."""
    if run.env.get("request", {}).get("subject") != SUBJECT:
        return None
    ours: Any = resolve(SUBJECT)

    def features_of(text: str) -> Iterable[str]:
        found: Iterable[str] = ours.features(read_case(text))
        return found

    return opening.pairs_of_features(zip(headline["case"], headline["verdict"], strict=True), features_of)


def _flatten_values(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten_values(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
