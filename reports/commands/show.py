"""A stored run shown: what `shardproof run` prints at its end, `shardproof show`, `shardproof page`."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, TextIO

import pandas as pd

from harness.errors import RequestError
from harness.running.run_result import RunResult
from reports.comparing import modes
from reports.options.checks import EXPERIMENTS
from reports.pages import page
from reports.pages.opening import experts
from reports.printing import tables
from reports.printing.calls import witness_tables
from reports.printing.tables import NOTHING, Table, count, mebibytes
from reports.printing.text import (
    STYLES,
    append_step_summary,
    show_message,
    show_note,
    show_report,
    show_table,
    show_words,
)
from reports.stored import summary
from reports.stored.files import is_matrix, recorded, run_folder
from reports.stored.frames import Run, load
from reports.stored.unchecked import unchecked_notes


def main(arguments: argparse.Namespace) -> int:
    """Print the tables of a run, or of a kill matrix; exit status 0 when it could be read, whatever its verdicts."""
    if is_matrix(folder := run_folder(arguments.run)):
        from reports.commands.faults import show_matrix  # noqa: PLC0415

        show_matrix(folder, sys.stdout)
    else:
        show_run(load(arguments.run), sys.stdout)
    return 0


def page_main(arguments: argparse.Namespace) -> int:
    """Write the page of a run and print where it is; with `markdown` print or write a comment of it.

    Raises RequestError when the file cannot be written.
    """
    from reports.pages.comment import comment  # noqa: PLC0415

    run = load(arguments.run)
    if arguments.markdown and not arguments.output:
        show_message(comment(run), sys.stdout)
        return 0
    target = Path(arguments.output) if arguments.output else run.path / "report.html"
    try:
        if arguments.markdown:
            target.write_text(comment(run), encoding="utf-8")
        else:
            page.write(run, target)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise RequestError(f"-o {target}: cannot be written ({reason}); legal: -o report.html") from problem
    show_message(str(target), sys.stdout)
    return 0


def write_page(run: Run) -> Path:
    """Write the page of a run into its folder."""
    return page.write(run, run.path / "report.html")


def show_result(result: RunResult, run: Run, *, as_json: bool, interrupted: bool) -> None:
    """Print what a run came to, as tables or as one JSON object: of an interrupted one what was finished."""
    rows = summary.headline(run)
    if interrupted:
        rows = rows[rows["case"].isin(run.verdicts["case"])]
    notes = (*result.notes, *unchecked_notes(run), *run.notes)
    if len(rows):
        headline = tables.first_table(rows)
        append_step_summary(headline, str(result.path), os.environ)
    if as_json:
        print(json.dumps(_as_json(result, run, rows, notes), indent=2, allow_nan=False))
        return
    if len(rows):
        show_table(headline, sys.stdout)
    for table in witness_tables(result.path):
        show_table(table, sys.stdout)
    show_failures(run, sys.stdout)
    for note in notes:
        show_note(note, sys.stdout)
    page_words = "report.html opens offline; " if (result.path / "report.html").exists() else ""
    show_words(f"{result.path}  ({page_words}`shardproof show` prints all tables)", sys.stdout)
    _show_tally(run, sys.stdout)


def _as_json(result: RunResult, run: Run, rows: pd.DataFrame, notes: Sequence[str]) -> dict[str, object]:
    """The result for machines: exit status, folder, one object a case, every check that did not pass."""
    told = run.verdicts[run.verdicts["verdict"].isin(["fail", "unknown"])]
    return {
        "exit_status": result.exit_status,
        "run": str(result.path),
        "tally": summary.tally(summary.headline(run), run.verdicts),
        "cases": _rows(rows),
        "failures": _rows(told[["case", "check", "verdict", "message"]]),
        "notes": list(notes),
    }


def _rows(frame: pd.DataFrame) -> list[dict[str, object]]:
    """The rows as JSON can hold them: what is not known is null, infinity is text."""
    known = frame.astype("object").where(frame.notna(), None)
    return [{str(key): _plain(value) for key, value in row.items()} for row in known.to_dict("records")]


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def show_run(run: Run, stream: TextIO) -> None:
    """Headline, traffic beside its expectation, break-even when the run has one, failures, notes."""
    if recorded(run.path):
        _show_program(run, stream)
        return
    headline = summary.headline(run)
    first, cases = tables.first_table(headline), tables.headline_table(headline)
    for table in dict.fromkeys((first, cases)):
        show_table(table, stream)
    show_table(tables.traffic_table(summary.traffic(run)), stream)
    crossings = modes.compared(run)
    if len(crossings):
        show_table(tables.break_even_table(crossings), stream)
    if len(pipelines := summary.measured(run)):
        show_table(tables.pipeline_table(pipelines, summary.cores(run)), stream)
    for table in (*experts(run), *witness_tables(run.path)):
        show_table(table, stream)
    show_failures(run, stream)
    for note in (*unchecked_notes(run), *run.notes):
        show_note(note, stream)
    _show_tally(run, stream)


def _show_tally(run: Run, stream: TextIO) -> None:
    """The last line: how many cases passed, failed, are unknown, were skipped; how many tensors are decided."""
    headline = summary.headline(run)
    show_message(summary.tally(headline, run.verdicts), stream, style=f"bold {STYLES[summary.overall(headline)]}")


def _show_program(run: Run, stream: TextIO) -> None:
    """A recorded program: what it did, what is worth knowing, notes."""
    from reports.programs import figures  # noqa: PLC0415
    from reports.programs import tables as programs  # noqa: PLC0415

    for table in (programs.overview(run), *programs.tables(run)):
        show_table(table, stream)
    for finding in figures.findings(run):
        show_message(finding, stream)
    for note in run.notes:
        show_note(note, stream)


def _show_bugs(run: Run, stream: TextIO) -> None:
    from reports.stored.failures import bugs, simplest_first  # noqa: PLC0415

    for bug in bugs(simplest_first(run)):
        show_report("fail", f"fail: {bug.case}", [*bug.message.splitlines(), *filter(None, [bug.follows])], stream)


def show_failures(run: Run, stream: TextIO) -> None:
    """Six lines for every first place of failures, the simplest case first, with the checks that fail from there on;
    then a reason for every check that was skipped or could not be decided.
    """
    if (run.verdicts["verdict"] == "fail").any():
        _show_bugs(run, stream)
    for verdict in summary.worst_first(run.verdicts).to_dict("records"):
        if verdict["verdict"] not in ("pass", "fail"):
            head = f"{_told(verdict)}: {verdict['case']}"
            show_report(str(verdict["verdict"]), head, str(verdict["message"]).splitlines(), stream)


def _told(verdict: dict[Hashable, Any]) -> str:
    """The verdict; of an unknown one the check too, which a failure's six lines and a reason to skip do not need."""
    word, check = verdict["verdict"], verdict["check"]
    return f"{word} ({check})" if word == "unknown" else str(word)


MEGATRON = {
    "embedding": "word_embeddings",
    "attention.wqkv": "linear_qkv",
    "attention.wo": "linear_proj",
    "mlp.w1": "linear_fc1",
    "mlp.w2": "linear_fc2",
    "head": "output_layer",
}
"""What Megatron-Core calls our modules."""


def experiment_table(run: Run, name: str) -> Table:
    """The calls of one micro-batch and of the step around it on rank 0, in order, same parts of layers together."""
    ledger = run.ledger
    last = ledger[(ledger["rank"] == 0) & (ledger["step"] == ledger["step"].max())]
    inner = last[~last["phase"].isin(["grad_sync", "step", "metric"])]
    outer = last[last["phase"].isin(["grad_sync", "step", "metric"])]
    one = pd.concat([inner[inner["microbatch"] == inner["microbatch"].max()], outer]).sort_values("call_index")
    parts = one["region"].astype(str).map(lambda region: re.sub(r"^layers\.\d+\.", "", region))
    one = one.assign(part=parts, phase=one["phase"].astype(str), op=one["op"].astype(str))
    rows = []
    named = EXPERIMENTS[name].named
    first_us = float(one["start_us"].min())
    for (phase, part, op), calls in one.groupby(["phase", "part", "op"], sort=False):
        at = ", ".join(f"{(float(start) - first_us) / 1e3:.1f}" for start in calls["start_us"].head(4))
        more = " ..." if len(calls) > 4 else ""
        stated = "yes" if (phase, part) in named else "no"
        module = MEGATRON.get(str(part), NOTHING)
        payload = mebibytes(int(calls["payload_bytes"].sum()))
        rows.append((str(phase), str(op), str(part) or NOTHING, module, count(len(calls)), payload, stated, at + more))
    return Table(
        title="One micro-batch and the end of its step, rank 0, in order",
        headers=("phase", "op", "module", "in Megatron", "calls", "MiB", "in the walk", "at, ms"),
        rows=tuple(rows),
        numbers=frozenset({4, 5}),
        note="at: start of the first calls, from the first of these; in the walk: whether the published text names it",
    )
