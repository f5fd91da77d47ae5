"""The result of `shardproof run`: its page, and what is printed at its end, from the run folder."""

import inspect
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pandas as pd

from shardproof.harness.errors import ShardproofError
from shardproof.harness.resolve import resolve
from shardproof.harness.running.run_result import RunResult
from shardproof.harness.verdicts.verdict import FAIL
from shardproof.reports.pages import page
from shardproof.reports.printing import text_tables
from shardproof.reports.printing.printable import Failure, annotate_failures
from shardproof.reports.printing.text import (
    STYLES,
    append_step_summary,
    show_message,
    show_note,
    show_report,
    show_table,
    show_words,
)
from shardproof.reports.printing.witnesses import witness_tables
from shardproof.reports.stored import summary
from shardproof.reports.stored.failures import bugs_of_run, find_first_caller, open_checks, simplest_first
from shardproof.reports.stored.frames import Run, load
from shardproof.reports.stored.unchecked import unchecked_notes


def load_with_page(folder: Path) -> tuple[Run, str]:
    """Read a run folder and write its page. Returns the run, and why the page could not be written ("" if it was)."""
    run = load(folder)
    return run, write_page(run)


def write_page(run: Run) -> str:
    """Write the page of a run into its folder. Returns why it could not be written, or "": no OSError ends the run."""
    path = run.path / "report.html"
    try:
        page.write_page(run, path)
    except OSError as problem:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # a half-written page
        reason = problem.strerror or str(problem)
        return f"report.html was not written ({reason}); `shardproof page RUN -o FILE` writes it elsewhere"
    return ""


def show_result(result: RunResult, run: Run, *, as_json: bool, interrupted: bool) -> None:
    """Print the result of a run as tables or as one JSON object; of an interrupted run the cases that were finished."""
    every = summary.headline(run)
    rows = every[every["case"].isin(run.verdicts["case"])] if interrupted else every
    notes = (*result.notes, *unchecked_notes(run), *run.notes)
    if len(rows):
        headline = text_tables.first_table(rows)
        append_step_summary(headline, str(result.path), os.environ)
    annotate_failures(_list_failures(run), sys.stderr, os.environ)
    if as_json:
        tally = summary.tally_of_run(every, run.records)
        print(json.dumps(_as_json(result, run, rows, tally, notes), indent=2, allow_nan=False))
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
    show_tally(run, every, sys.stdout)


def _list_failures(run: Run) -> Iterator[Failure]:
    """Each first wrong place: file and line of its first call or else of the subject, check and case, and its lines."""
    if (run.verdicts["verdict"] == FAIL).any():
        for bug in bugs_of_run(simplest_first(run)):
            one = bug.verdict
            calls = run.ledger[run.ledger["case"] == one.case]
            at = find_first_caller(calls, one.failure) or _place_of_subject(run)
            yield at, f"{one.check}: {one.case}", "\n".join(one.lines)


def _place_of_subject(run: Run) -> str:
    """File and line of the subject, "file:line"; "" if they are unknown."""
    try:
        call = resolve(str(run.env.get("request", {}).get("subject")))
        code = getattr(inspect.unwrap(call if inspect.isfunction(call) else type(call).__call__), "__code__", None)
    except (ShardproofError, ValueError):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def _as_json(result: RunResult, run: Run, rows: pd.DataFrame, tally: str, notes: Sequence[str]) -> dict[str, object]:
    """The result for machines: exit status, folder, one object a case, every check that failed or is unknown."""
    open_checks = run.verdicts[run.verdicts["verdict"].isin(["fail", "unknown"])]
    return {
        "exit_status": result.exit_status,
        "run": str(result.path),
        "tally": tally,
        "cases": _rows_as_json(rows),
        "failures": _rows_as_json(open_checks[["case", "check", "verdict", "message"]]),
        "notes": list(notes),
    }


def _rows_as_json(frame: pd.DataFrame) -> list[dict[str, object]]:
    """The rows as JSON can hold them: infinity is text."""
    return [
        {key: str(value) if isinstance(value, float) and math.isinf(value) else value for key, value in row.items()}
        for row in text_tables.records(frame)
    ]


def show_failures(run: Run, stream: TextIO) -> None:
    """Print six lines for every first wrong place, the simplest case first, then the checks that fail because of it.

    Then each reason for which checks were skipped or could not be decided, once for all of its cases.
    """
    if (run.verdicts["verdict"] == "fail").any():
        for bug in bugs_of_run(simplest_first(run)):
            lines = [*bug.verdict.lines, *filter(None, [bug.follows])]
            show_report("fail", f"fail: {bug.verdict.case}", lines, stream)
    for one in open_checks(simplest_first(run)):
        show_report(one.verdict, one.title, one.lines, stream)


def show_tally(run: Run, headline: pd.DataFrame, stream: TextIO) -> None:
    """The last line: how many cases passed, failed, are unknown, were skipped; how many tensors are decided."""
    show_message(
        summary.tally_of_run(headline, run.records), stream, style=f"bold {STYLES[summary.worst_verdict(headline)]}"
    )
