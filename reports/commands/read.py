"""`shardproof read`: reads traces of a job as a run folder, shows it, and compares it with the intended layout.

Exit status: 0; 1 if the calls are not those of the closed form; 2 for files without traces, or a wrong request.
"""

import argparse
import os
import sys
from pathlib import Path

from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.errors import RequestError
from shardproof.harness.programs.meant import AgainstForm, compare_with_form
from shardproof.harness.programs.session import steps_of
from shardproof.harness.programs.traced import select_steps, write_folder
from shardproof.harness.subject import case_of, refusal, resolve_subject
from shardproof.harness.traces.reading import read_traces
from shardproof.reports.commands.show import show_run
from shardproof.reports.printing.text import show_message, show_note
from shardproof.reports.stored.frames import load


def main(arguments: argparse.Namespace) -> int:
    """Read, write the run folder, show it; with a case compare. Raises RequestError for what cannot be read."""
    steps = steps_of(arguments.steps)
    subject, text = arguments.subject or (SUBJECT, arguments.case)
    meant = None if text is None else (resolve_subject(subject), text)
    case = None if meant is None else case_of(meant[1], meant[0])
    if meant is not None and case is not None and (reason := refusal(case, meant[0])):
        raise RequestError(f"case {text!r}: {reason}")
    traces = select_steps(read_traces(arguments.files, arguments.rank_regex), steps)
    against = None if meant is None or case is None else compare_with_form(traces, case, meant[0].call, meant[1])
    words = {"case": text} if arguments.case else {}
    folder = write_folder(traces, Path(arguments.out), _name_of_job(arguments.files), ["read", *arguments.files], words)
    show_run(load(folder), sys.stdout)
    print(f"{os.path.relpath(folder)}  (a run folder: show, page, trace, compare and expect take it)", file=sys.stderr)
    if against is None:
        return 0
    _show_against(against, text)
    return 1 if against.unmeant else 0


def _name_of_job(files: list[str]) -> str:
    """The name of the job: that of the folder of its first trace, else of the file."""
    first = Path(files[0]).resolve()
    return first.name if first.is_dir() or len(files) == 1 else first.parent.name


def _show_against(against: AgainstForm, text: str) -> None:
    for note in against.notes:
        show_note(note, sys.stdout)
    for one in against.unmeant:
        show_message(str(one), sys.stdout)
    if not against.unmeant:
        show_message(f"all {against.calls} calls are those of {text!r}, and none is missing", sys.stdout, style="green")
