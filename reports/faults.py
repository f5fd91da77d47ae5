"""`shardproof faults`: bugs planted one at a time, and which check notices each; the kill matrix.

Our own implementation is mutated in its source; any subject is disturbed in its collectives. Rows are written as they
come: a run that is killed leaves those it has. Exit status: 0 all killed, 1 one survived that is no equivalent, 2 the
request was wrong, 3 the machine failed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.checks import CHECKS
from harness.environment import environment
from harness.kill_matrix import COLUMNS, Figures, Kill, figures, killed_alone
from harness.resolve import resolve
from harness.store import Store
from reports.tables import Table
from reports.text import append_step_summary, show_message, show_table, ticking

__all__ = ["check_table", "figure_table", "main", "matrix_table", "unmissed_table"]

KILLING = "suites.killing"
_PROCESSES = 2


def main(arguments: argparse.Namespace) -> int:
    """Plant, prove, write, tell."""
    resolve(arguments.subject)
    planned: Any = resolve(f"{KILLING}:planned")
    kills: Any = resolve(f"{KILLING}:kills")
    plans = planned(arguments.subject, quick=arguments.quick)
    total = sum(plan.rows for plan in plans)
    words = {"subject": arguments.subject, "quick": arguments.quick, "rows": total}
    store = Store(Path(arguments.out), arguments.subject, environment(tuple(sys.argv), words))
    processes = min(_PROCESSES, os.cpu_count() or 1)
    try:
        found = _written(kills(plans, arguments.subject, processes=processes), store.path, total)
    except KeyboardInterrupt:
        show_message(f"\nfinished rows are in {store.path / 'kill_matrix.csv'}", sys.stderr)
        raise
    finally:
        store.close()
    _tell(found, store.path, arguments.json)
    return 1 if any(killed.row.survived for killed in found) else 0


def _written(kills: Iterable[Any], folder: Path, total: int) -> list[Any]:
    """All rows, each written before the next one is waited for: the matrix, and beside it what every row rests on."""
    found: list[Any] = []
    with (
        ticking(sys.stderr) as tick,
        (folder / "kill_matrix.csv").open("w", encoding="utf-8", newline="") as matrix,
        (folder / "kills.jsonl").open("w", encoding="utf-8") as details,
    ):
        writer = csv.writer(matrix, lineterminator="\n")
        writer.writerow(COLUMNS)
        for killed in kills:
            found.append(killed)
            writer.writerow(killed.row.cells())
            details.write(json.dumps(_detail(killed)) + "\n")
            matrix.flush()
            details.flush()
            row = killed.row
            tick(len(found), total, f"mode={row.mode} {row.name} {' '.join(row.killed_by)}".rstrip(), _word(row))
    return found


def _detail(killed: Any) -> dict[str, str]:
    row: Kill = killed.row
    return {
        "name": row.name,
        "mode": row.mode,
        "case": killed.case,
        "told": killed.told,
        "equivalent": row.equivalent,
        "unmissed": killed.unmissed,
    }


def _word(row: Kill) -> str:
    return "killed" if row.killed else "equivalent" if row.equivalent else "survived"


def _tell(found: Sequence[Any], folder: Path, as_json: bool) -> None:
    rows: list[Kill] = [killed.row for killed in found]
    unmissed = [(killed.row.mode, killed.row.name.removeprefix("drop "), killed.unmissed) for killed in found]
    unmissed = sorted(line for line in unmissed if line[-1])
    summed, alone = figures(rows), killed_alone(rows, tuple(CHECKS))
    table = figure_table(summed)
    append_step_summary(table, str(folder), os.environ)
    if as_json:
        told = _as_json(rows, summed, alone, folder) | {"unmissed": unmissed}
        print(json.dumps(told, indent=2))
        return
    for shown in (matrix_table(rows), check_table(alone), unmissed_table(unmissed), table):
        show_table(shown, sys.stdout)
    for row in rows:
        if row.survived:
            show_message(f"survived: {row.name} in mode={row.mode} ({row.stands_for})", sys.stdout, style="bold red")
    show_message(f"{folder / 'kill_matrix.csv'}  (kills.jsonl beside it: cases, first places, proofs)", sys.stdout)


def matrix_table(rows: Sequence[Kill]) -> Table:
    """One line a mutant, fault or variant: the modes it was planted in, who killed it in all of them, how soon."""
    by_name: dict[tuple[str, str], list[Kill]] = {}
    for row in rows:
        by_name.setdefault((row.kind, row.name), []).append(row)
    return Table(
        title="Planted bugs and the checks that kill them",
        headers=("kind", "name", "modes", "killed", "by all of", "seconds"),
        rows=tuple(_line(kind, name, of_it) for (kind, name), of_it in sorted(by_name.items())),
        numbers=frozenset({5}),
        note="by all of: checks that failed in every mode; seconds: the slowest mode",
    )


def _line(kind: str, name: str, rows: Sequence[Kill]) -> tuple[str, ...]:
    said = "equivalent" if rows[0].equivalent else f"{sum(row.killed for row in rows)} of {len(rows)}"
    always = [check for check in rows[0].killed_by if all(check in row.killed_by for row in rows)]
    modes = " ".join(sorted(row.mode for row in rows))
    return kind, name, modes, said, " ".join(always) or "-", f"{max(row.seconds for row in rows):.2f}"


def check_table(alone: Mapping[str, tuple[int, int, str]]) -> Table:
    """One line a check: rows it kills, rows that nothing else kills, and one of these."""
    return Table(
        title="What every check is for",
        headers=("check", "kills", "alone", "for example"),
        rows=tuple((check, str(kills), str(only), name or "-") for check, (kills, only, name) in alone.items()),
        numbers=frozenset({1, 2}),
        note="alone: rows that no other check kills",
    )


def unmissed_table(unmissed: Sequence[tuple[str, str, str]]) -> Table:
    """One line a collective (mode, name, why) whose loss on every rank nobody notices."""
    return Table(
        title="Collectives that no check proves necessary",
        headers=("mode", "collective", "why"),
        rows=tuple(unmissed) or (("-", "none", "-"),),
        numbers=frozenset(),
        note="redundant or dead traffic, or a blind spot of the checks",
    )


def figure_table(summed: Figures) -> Table:
    """The figures over all rows."""
    shares = {
        "killed, of those that are no equivalents": summed.killed,
        "first place right, of those that have one": summed.region_right,
        "cause right, of those that have a word for it": summed.cause_right,
        "cause right, of all mutants and variants": summed.cause_right_of_all,
    }
    lines = [(name, f"{part} of {whole}", _percent(part, whole)) for name, (part, whole) in shares.items()]
    lines.append(("median time to kill", f"{summed.median_s:.2f} s", ""))
    lines.append(("equivalents, each with its proof", str(summed.equivalent), ""))
    return Table(
        title="Figures", headers=("what", "how many", "share"), rows=tuple(lines), numbers=frozenset({1, 2}), note=""
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _as_json(
    rows: Sequence[Kill], summed: Figures, alone: Mapping[str, tuple[int, int, str]], folder: Path
) -> dict[str, object]:
    return {
        "run": str(folder),
        "rows": len(rows),
        "killed": summed.killed,
        "equivalent": summed.equivalent,
        "median_s": summed.median_s,
        "region_right": summed.region_right,
        "cause_right": summed.cause_right,
        "cause_right_of_all": summed.cause_right_of_all,
        "survivors": [{"name": row.name, "mode": row.mode} for row in rows if row.survived],
        "checks": {check: {"kills": kills, "alone": only} for check, (kills, only, _) in alone.items()},
    }
