"""`shardproof show` and `shardproof page`: a stored run shown again, as tables in the terminal or as one HTML file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TextIO

from harness.errors import RequestError
from reports.comparing import breakeven
from reports.pages import page
from reports.printing import tables, witnesses
from reports.printing.text import show_message, show_table
from reports.programs import tables as programs
from reports.stored import stages, summary
from reports.stored.bugs import bugs
from reports.stored.frames import Run, load
from reports.stored.parts import recorded
from reports.stored.unchecked import unchecked_notes

__all__ = ["main", "page_main", "show_failures", "show_run"]


def main(arguments: argparse.Namespace) -> int:
    """Print the tables of a run; exit status 0 when it could be read, whatever its verdicts."""
    show_run(load(arguments.run), sys.stdout)
    return 0


def page_main(arguments: argparse.Namespace) -> int:
    """Write the page of a run and print where it is. Raises RequestError when it cannot be written."""
    run = load(arguments.run)
    target = Path(arguments.output) if arguments.output else run.path / "report.html"
    try:
        page.write(run, target)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise RequestError(f"-o {target}: cannot be written ({reason}); legal: -o report.html") from problem
    show_message(str(target), sys.stdout)
    return 0


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
    crossings = breakeven.compared(run)
    if len(crossings):
        show_table(tables.break_even_table(crossings), stream)
    if len(pipelines := stages.measured(run)):
        show_table(tables.pipeline_table(pipelines, stages.cores(run)), stream)
    for table in witnesses.tables(run.path):
        show_table(table, stream)
    show_failures(run, stream)
    for note in (*unchecked_notes(run), *run.notes):
        show_message(f"note: {note}", stream, style="yellow")


def _show_program(run: Run, stream: TextIO) -> None:
    """A recorded program: what it did, what is worth knowing, notes."""
    for table in (programs.overview(run), *programs.tables(run)):
        show_table(table, stream)
    for finding in programs.findings(run):
        show_message(finding, stream)
    for note in run.notes:
        show_message(f"note: {note}", stream, style="yellow")


def show_failures(run: Run, stream: TextIO) -> None:
    """Six lines for every first place of failures, with the count of what else fails from there on; then a reason for
    every check that was skipped or could not be decided.
    """
    for bug in bugs(run.verdicts):
        follows = f"{bug.follows}\n" if bug.follows else ""
        show_message(f"fail: {bug.case}\n{bug.message}\n{follows}", stream)
    for verdict in summary.worst_first(run.verdicts).to_dict("records"):
        if verdict["verdict"] not in ("pass", "fail"):
            show_message(f"{_told(verdict)}: {verdict['case']}\n{verdict['message']}\n", stream)


def _told(verdict: dict[Hashable, Any]) -> str:
    """The verdict; of an unknown one the check too, which a failure's six lines and a reason to skip do not need."""
    word, check = verdict["verdict"], verdict["check"]
    return f"{word} ({check})" if word == "unknown" else str(word)
