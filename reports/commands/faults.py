"""`shardproof faults`: bugs planted one at a time, and which check notices each; the kill matrix.

Our own implementation is mutated in its source; any subject is disturbed in its collectives. Rows are written as they
come: a run that is killed leaves those it has. Mutants that are held back (`bugs/held_back`) are counted apart. Nothing
that is written or printed shows which of them got which place or cause. Exit status: 0 all killed, 1 one survived that
is no equivalent, 2 the request was wrong. 3 stands for a machine that failed, or could not finish a row. With
--emit-repro bugs become scripts: 0 one at least, 1 none.
"""

import argparse
import csv
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from shardproof.harness.checking.checks import CHECKS
from shardproof.harness.protocols import case_text
from shardproof.harness.resolve import resolve
from shardproof.harness.running.injecting import COLUMNS, Figures, Kill, figures, killed_alone
from shardproof.harness.running.request import seconds
from shardproof.harness.running.store import Store, environment
from shardproof.harness.subject import cases_of, resolve_subject
from shardproof.reports.options.request import check_writing
from shardproof.reports.printing.text import (
    append_step_summary,
    show_message,
    show_note,
    show_progress,
    show_table,
    show_words,
)
from shardproof.reports.printing.text_tables import Table
from shardproof.reports.stored.files import MATRIX, RunFolderError, environment_of
from shardproof.reports.stored.frames import csv_table

KILLING = "shardproof.suites.killing"
_SCRIPTS = "shardproof.suites.killing:scripts"
_PROCESSES = 2


def main(arguments: argparse.Namespace) -> int:
    """Plant, prove, write the matrix, print; or write bugs as scripts."""
    if arguments.emit_repro is not None:
        return _write_scripts(*arguments.emit_repro, field=arguments.field)
    subject = resolve_subject(arguments.subject)
    plan_kills: Any = resolve(f"{KILLING}:plan_kills")
    run_kills: Any = resolve(f"{KILLING}:run_kills")
    only = "held-back" if arguments.held_back else "open" if arguments.open else ""
    timeout_s, dtype = seconds(arguments.timeout, "timeout"), arguments.dtype or ""
    cases = cases_of(arguments.cases, subject)
    asked = {"quick": arguments.quick, "only": only, "field": arguments.field, "dtype": dtype}
    plans = plan_kills(subject, **asked, cases=cases, timeout_s=timeout_s)
    total = sum(plan.rows for plan in plans)
    words = {"subject": subject.name, "cases": [case_text(case) for case in cases], **asked, "rows": total}
    store = Store(Path(arguments.out), subject.name, environment(tuple(sys.argv), words))
    processes = min(_PROCESSES, os.cpu_count() or 1)
    try:
        killed_rows = _write_rows(run_kills(plans, subject, processes=processes), store.path, total)
    except KeyboardInterrupt:
        show_message(f"\nfinished rows are in {store.path / 'kill_matrix.csv'}", sys.stderr)
        raise
    finally:
        store.close()
    _print_matrix(killed_rows, store.path, arguments.json)
    if any(killed.row.survived for killed in killed_rows):
        return 1
    return 3 if any(killed.row.machine for killed in killed_rows) else 0


def _write_scripts(name: str, folder: str, *, field: bool) -> int:
    """Write a script for each bug that a script can show, and print a line. Exit status 1 if there is none."""
    scripts: Any = resolve(_SCRIPTS)
    bugs, written = scripts(name, field=field), 0
    with check_writing(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
    for bug, text, why in bugs:
        file = Path(folder) / f"{bug}.py"
        if text:
            with check_writing(str(file)):
                file.write_text(text, encoding="utf-8")
            written += 1
        show_message(str(file) if text else f"{bug}: no script: {why}", sys.stdout)
    return 0 if written else 1


def _write_rows(kills: Iterable[Any], folder: Path, total: int) -> list[Any]:
    """Write each row to the matrix, and its evidence to kills.jsonl, before the next one; returns all rows."""
    done: list[Any] = []
    with (
        show_progress(sys.stderr) as tick,
        (folder / "kill_matrix.csv").open("w", encoding="utf-8", newline="") as matrix,
        (folder / "kills.jsonl").open("w", encoding="utf-8") as details,
    ):
        writer = csv.writer(matrix, lineterminator="\n")
        writer.writerow(COLUMNS)
        for killed in kills:
            done.append(killed)
            writer.writerow(killed.row.cells())
            details.write(json.dumps(_detail_of_kill(killed)) + "\n")
            matrix.flush()
            details.flush()
            row = killed.row
            named = "held-back" if row.held_back else f"{row.name} {' '.join(row.killed_by)}".rstrip()
            tick(len(done), total, f"mode={row.mode} {named}", _word_of_row(row))
    return done


def _detail_of_kill(killed: Any) -> dict[str, str]:
    row: Kill = killed.row
    if row.held_back:
        return {"name": "held-back", "mode": row.mode, "equivalent": row.equivalent}
    words = {"name": row.name, "mode": row.mode, "case": killed.case, "told": killed.diagnosed}
    return words | {"equivalent": row.equivalent, "unmissed": killed.unmissed}


def _word_of_row(row: Kill) -> str:
    return "killed" if row.killed else "equivalent" if row.equivalent else "no verdict" if row.machine else "survived"


def _print_matrix(killed_rows: Sequence[Any], folder: Path, as_json: bool) -> None:
    rows: list[Kill] = [killed.row for killed in killed_rows]
    unmissed = [(killed.row.mode, killed.row.name.removeprefix("drop "), killed.unmissed) for killed in killed_rows]
    unmissed = sorted(line for line in unmissed if line[-1])
    open_rows, held_rows = _split_rows(rows)
    alone, tables = killed_alone(rows, tuple(CHECKS)), figure_tables(rows)
    for table in tables:
        append_step_summary(table, str(folder), os.environ)
    if as_json:
        summary = {
            "run": str(folder),
            "rows": len(rows),
            **_shares_as_json(figures(open_rows)),
            "survivors": [{"name": row.name, "mode": row.mode} for row in rows if row.survived],
            "checks": {check: {"kills": kills, "alone": only} for check, (kills, only, _) in alone.items()},
            "unmissed": unmissed,
        }
        summary |= {"held_back": _shares_as_json(figures(held_rows))} if held_rows else {}
        print(json.dumps(summary, indent=2))
        return
    dispensable = Table(
        title="Collectives that no check proves necessary",
        headers=("mode", "collective", "why"),
        rows=tuple(unmissed) or (("-", "none", "-"),),
        note="redundant or dead traffic, or a blind spot of the checks",
    )
    apart = (matrix_table(open_rows), check_table(alone), dispensable) if open_rows else ()
    for shown in (*apart, *tables):
        show_table(shown, sys.stdout)
    for row in rows:
        if row.survived:
            show_words(f"survived: {row.name} in mode={row.mode} ({row.stands_for})", sys.stdout, style="bold red")
        elif row.machine:
            show_words(f"no verdict: {row.name} in mode={row.mode}: {row.machine}", sys.stdout, style="bold yellow")
    show_words(f"{folder / 'kill_matrix.csv'}  (kills.jsonl beside it: cases, first places, proofs)", sys.stdout)


def show_matrix(folder: Path, stream: TextIO) -> None:
    """Print what `shardproof faults` wrote into a folder. Raises RunFolderError for a file that it did not write."""
    notes: list[str] = []
    env = environment_of(folder, notes)
    frame = csv_table(folder / MATRIX, dict.fromkeys(COLUMNS, "str"), COLUMNS, notes)
    try:
        rows = [Kill.of({str(key): str(cell) for key, cell in row.items()}) for row in frame.to_dict("records")]
    except ValueError as problem:
        raise RunFolderError(f"{folder / MATRIX}: seconds must be a number ({problem})") from problem
    words = env.get("request", {})
    planned, subject = words.get("rows", len(rows)), words.get("subject", "a subject")
    heading = f"what `shardproof faults` found: {len(rows)} of {planned} bugs planted in {subject}"
    show_words(f"{heading}; no run of cases, so no verdict on it\n", stream)
    open_rows = [row for row in rows if not row.held_back]
    apart = (matrix_table(open_rows), check_table(killed_alone(rows, tuple(CHECKS)))) if open_rows else ()
    for shown in (*apart, *figure_tables(rows)):
        show_table(shown, stream)
    for row in open_rows:
        if row.survived:
            show_words(f"not killed: {row.name} in mode={row.mode} ({row.stands_for})", stream, style="bold red")
    for note in notes:
        show_note(note, stream)


def matrix_table(rows: Sequence[Kill]) -> Table:
    """Table of mutants, faults and variants: the modes of each, what killed it in all of them, how soon."""
    by_name: dict[tuple[str, str], list[Kill]] = {}
    for row in rows:
        by_name.setdefault((row.kind, row.name), []).append(row)
    return Table(
        title="Planted bugs and the checks that kill them",
        headers=("kind", "name", "modes", "killed", "by all of", "seconds"),
        rows=tuple(_line_of_table(kind, name, of_it) for (kind, name), of_it in sorted(by_name.items())),
        numbers=frozenset({5}),
        note="by all of: checks that failed in every mode; seconds: the slowest mode",
    )


def _line_of_table(kind: str, name: str, rows: Sequence[Kill]) -> tuple[str, ...]:
    outcome = "equivalent" if rows[0].equivalent else f"{sum(row.killed for row in rows)} of {len(rows)}"
    always = [check for check in rows[0].killed_by if all(check in row.killed_by for row in rows)]
    modes = " ".join(sorted(row.mode for row in rows))
    return kind, name, modes, outcome, " ".join(always) or "-", f"{max(row.seconds for row in rows):.2f}"


def check_table(alone: Mapping[str, tuple[int, int, str]]) -> Table:
    """Table of checks: how many rows each kills, how many no other check kills, and one of those."""
    return Table(
        title="What every check is for",
        headers=("check", "kills", "alone", "for example"),
        rows=tuple((check, str(kills), str(only), name or "-") for check, (kills, only, name) in alone.items()),
        numbers=frozenset({1, 2}),
        note="alone: rows that no other check kills",
    )


def _split_rows(rows: Sequence[Kill]) -> tuple[list[Kill], list[Kill]]:
    """Open rows and held-back ones."""
    return [row for row in rows if not row.held_back], [row for row in rows if row.held_back]


def figure_tables(rows: Sequence[Kill]) -> list[Table]:
    """The figures of open rows and of held-back rows, as far as there are such rows."""
    open_rows, held_rows = _split_rows(rows)
    tables = [figure_table(figures(open_rows))] if open_rows or not held_rows else []
    return tables + ([figure_table(figures(held_rows), title="Figures of the held-back mutants")] if held_rows else [])


def figure_table(summed: Figures, title: str = "Figures") -> Table:
    """The figures over some rows."""
    shares = {
        "killed, of those that are no equivalents": summed.killed,
        "first place right, of those that have one": summed.region_right,
        "cause right, of those that have a right one": summed.cause_right,
        "cause right, and a wrong one beside it": summed.cause_more,
        "no cause reported": summed.cause_none,
        "cause misleading": summed.cause_misleading,
    }
    if summed.twin_quiet[1]:
        shares |= {"words that the failure needs found": summed.when_told, "quiet without the bug": summed.twin_quiet}
    lines = [
        (name, f"{part} of {whole}", f"{100 * part / whole:.1f} %" if whole else "-")
        for name, (part, whole) in shares.items()
    ]
    lines.append(("median time to kill", f"{summed.median_s:.2f} s", ""))
    lines.append(("equivalents, each with its proof", str(summed.equivalent), ""))
    lines += [("no verdict, the machine could not finish", str(summed.unfinished), "")] if summed.unfinished else []
    return Table(
        title=title,
        headers=("what", "how many", "share"),
        rows=tuple(lines),
        numbers=frozenset({1, 2}),
        note="a cause is right when the first one reported is right for this bug, misleading when it is not",
    )


def _shares_as_json(summed: Figures) -> dict[str, object]:
    return {field.name: getattr(summed, field.name) for field in dataclasses.fields(summed)}
