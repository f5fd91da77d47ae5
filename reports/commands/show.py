"""A stored run shown: `shardproof show`, `shardproof page`."""

import argparse
import sys
from typing import TextIO

from shardproof.reports.commands.faults import show_matrix
from shardproof.reports.commands.result import show_failures, show_tally
from shardproof.reports.pages import page
from shardproof.reports.pages.comment import render_comment
from shardproof.reports.printing import text_tables
from shardproof.reports.printing.run_tables import break_even_table, compare_modes, expert_tables
from shardproof.reports.printing.text import show_busy, show_message, show_note, show_table, write_report
from shardproof.reports.printing.witnesses import witness_tables
from shardproof.reports.programs import figures
from shardproof.reports.programs import program_tables as programs
from shardproof.reports.stored import summary
from shardproof.reports.stored.files import is_matrix, is_recording, run_folder
from shardproof.reports.stored.frames import Run, load
from shardproof.reports.stored.unchecked import unchecked_notes


def main(arguments: argparse.Namespace) -> int:
    """Print the tables of a run, or of a kill matrix. Exit status 0 if it could be read, whatever its verdicts."""
    if is_matrix(folder := run_folder(arguments.run)):
        show_matrix(folder, sys.stdout)
    else:
        with show_busy(f"reading {arguments.run}", sys.stderr):
            run = load(arguments.run)
        show_run(run, sys.stdout)
    return 0


def page_main(arguments: argparse.Namespace) -> int:
    """Write the page of a run and print where it is; with `markdown` print or write a comment of it.

    Raises RequestError if the file cannot be written.
    """
    with show_busy(f"drawing {arguments.run}", sys.stderr):
        run = load(arguments.run)
        text = render_comment(run) if arguments.markdown else page.render_page(run)
    write_report(text, arguments.output or ("" if arguments.markdown else str(run.path / "report.html")))
    return 0


def show_run(run: Run, stream: TextIO) -> None:
    """Print all tables of a run, its failures, its notes and the tally; of a recorded program its findings instead."""
    if is_recording(run.path):
        _show_program(run, stream)
        return
    headline = summary.headline(run)
    first, cases = text_tables.first_table(headline), text_tables.headline_table(headline)
    for table in dict.fromkeys((first, cases)):
        show_table(table, stream)
    if len(lines := summary.traffic(run)):
        show_table(text_tables.traffic_table(lines), stream)
    crossings = compare_modes(run)
    if len(crossings):
        show_table(break_even_table(crossings), stream)
    if len(pipelines := summary.measure_pipelines(run)):
        show_table(text_tables.pipeline_table(pipelines, summary.cores_of_machine(run)), stream)
    for table in (*expert_tables(run.path), *witness_tables(run.path)):
        show_table(table, stream)
    show_failures(run, stream)
    for note in (*unchecked_notes(run), *run.notes):
        show_note(note, stream)
    show_tally(run, headline, stream)


def _show_program(run: Run, stream: TextIO) -> None:
    """A recorded program: what it did, findings, notes."""
    for table in (programs.overview_table(run), *programs.tables_of_program(run)):
        show_table(table, stream)
    for finding in figures.list_findings(run):
        show_message(finding, stream)
    for note in run.notes:
        show_note(note, stream)
