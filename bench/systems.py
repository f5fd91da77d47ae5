"""The matrix of other people's systems: what each cell of it gives under `shardproof run`, and the page that tells it.

    python -m bench.systems [--quick] [--only SYSTEM] [--out FILE] [--accept]

A cell is a case of a subject of `suites/subjects` on an engine. It is `pass` when `shardproof run` ends with status 0,
`known defect` when it fails and names the module of the finding, and `cannot run` when it ends in the error of its row.
Anything else is FAIL, and so are calls or bytes other than those that the page holds from earlier runs (`--accept`
takes the new ones). Needs the extra `peers`. A full run without a FAIL writes the page (docs/systems.md). Exit status 1
for a FAIL.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE, MEGATRON = ROOT / "docs" / "systems.md", ROOT / "docs" / "megatron.md"
PASSED, DEFECT, CANNOT, FAILED, NOT_RUN = "pass", "known defect", "cannot run", "FAIL", "not run here"
CHECKS = {"forward", "parameter_gradients", "update", "replicas", "ledger"}
"""What a passing cell has compared, at least."""
TABLE = ROOT / "bench" / "systems.txt"
ELSEWHERE = (
    ("torchtitan 0.3.0", "needs Python 3.12 and torch 2.14.1", "python3.12 -m pip install torch==2.14.1 torchtitan"),
    ("megatron-core 0.19.2", "needs Python 3.12", "python3.12 -m pip install megatron-core==0.19.2"),
)
"""Systems that are not run here: the reason, and what would install them."""


class Cell(NamedTuple):
    """One cell; `needle` is what the output must name where the cell is not expected to pass; `kept`: whether the page
    keeps its calls and bytes.
    """

    system: str
    package: str
    subject: str
    feature: str
    case: str
    engine: str = "inproc"
    quick: bool = False
    expected: str = PASSED
    needle: str = ""
    finding: str = ""
    kept: bool = True


Ledger = tuple[int, int]
"""Calls in forward and backward, and payload bytes, of a rank."""


class Seen(NamedTuple):
    """What a cell gave: its result and why, calls in forward and backward and payload bytes of a rank."""

    cell: Cell
    result: str
    why: str = ""
    calls: int = 0
    payload_bytes: int = 0


def cells() -> Iterator[Cell]:
    """Every cell, system by system."""
    for block in TABLE.read_text("utf-8").split("\n# ")[1:]:
        (system, package), *rows = block.splitlines()[0].split(": "), *block.splitlines()[1:]
        for row in filter(None, rows):
            subject, feature, case, marks = (*row.split(" | "), "")[:4]
            kind, _, rest = marks.partition(": ")
            needle, _, finding = rest.partition(": ")
            expected, engine = kind if rest else PASSED, "pool" if "pool" in marks.split() else "inproc"
            start, _, values = case.rstrip("}").partition("{")
            for value in values.split(","):
                where = (system, package, subject, feature, start + value, engine)
                yield Cell(*where, "quick" in marks.split(), expected, needle, finding, "unkept" not in marks.split())
        if "experts" in system:
            known = re.findall(r"^\| (.+) \| `(mcore_\w+)` \| `(.+)` \| `(.+)` \|$", MEGATRON.read_text("utf-8"), re.M)
            for finding, subject, words, module in known:
                case = f"{words} steps=1 micro=1"
                yield Cell(
                    system, package, subject, "as in megatron.md", case, "inproc", False, DEFECT, module, finding
                )


def run(group: Sequence[Cell], stored: dict[tuple[str, ...], Ledger]) -> Iterator[Seen]:
    """Cells of one subject, engine and expectation by one command; those that pass beside others that do not, again."""
    first, words = group[0], [cell.case for cell in group]
    with tempfile.TemporaryDirectory() as folder:
        subject = f"suites.subjects.{first.subject}:subject"
        options = ["--subject", subject, "--engine", first.engine, "--when", "0", "--timeout", "200", "--json"]
        command = [sys.executable, "-m", "shardproof", "run", *words, *options]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        _, start, told = done.stdout.rpartition('{\n  "exit_status"')  # libraries print in front of it
        if done.returncode not in (0, 1) or not start:
            yield from (Seen(cell, FAILED, " ".join(done.stderr.split()[-30:])) for cell in group)
            return
        told = json.loads(start + told)
        lines = (Path(folder) / told["run"] / "verdicts.jsonl").read_text("utf-8").splitlines()
    verdicts = [json.loads(line) for line in lines]
    again = []
    for cell in group:  # defaults are left out of a case's text
        mine = set(cell.case.split())
        row = max((row for row in told["cases"] if set(row["case"].split()) <= mine), key=lambda row: len(row["case"]))
        if row["verdict"] == PASSED and done.returncode and cell.expected == PASSED:
            again.append(cell)
        else:
            yield judged(cell, row, [one for one in verdicts if one["case"] == row["case"]], stored.get(key(cell)))
    if again:
        yield from run(again, stored)


def judged(cell: Cell, row: dict[str, Any], verdicts: Sequence[dict[str, Any]], stored: Ledger | None) -> Seen:
    """The result of a cell and why: from the row of its case, its verdicts by check and the ledger of earlier runs."""
    bad = [line for one in verdicts if one["verdict"] != PASSED for line in str(one["message"]).splitlines()]
    named = [line for line in bad if line.startswith(("what:", "first:"))]
    found = next((line for line in named if cell.needle in line), "")
    if cell.expected != PASSED and row["verdict"] == "fail" and found:
        error = found.partition("raised ")[2].partition(" (check")[0].split(", at ")[0]
        return Seen(cell, cell.expected, cell.finding or error)
    if cell.expected != PASSED or row["verdict"] != PASSED:
        return Seen(cell, FAILED, " ".join((f"the verdict is {row['verdict']}", *named[:2])))
    ledger = (int(row["forward_calls"] + row["backward_calls"]), int(row["payload_bytes"]))
    if missing := CHECKS - {one["check"] for one in verdicts if one["verdict"] == PASSED}:
        return Seen(cell, FAILED, f"not compared: {', '.join(sorted(missing))}")
    if stored not in (None, ledger):
        return Seen(cell, FAILED, f"calls and bytes are {ledger}, and on the page {stored}")
    return Seen(cell, PASSED, "", *ledger)


def key(cell: Cell) -> tuple[str, ...]:
    return cell.subject, cell.case, cell.engine


def stored_on(page: Path) -> dict[tuple[str, ...], Ledger]:
    """The ledger of every passing cell as the page has it: calls and bytes."""
    row = r"^\|[^|]*\| `(\w+)` \| `([^`]+)` \| (\w+) \| pass \| (\d+) \| (\d+) \|$"
    found = re.findall(row, page.read_text("utf-8") if page.exists() else "", re.MULTILINE)
    return {tuple(where): (int(calls), int(payload)) for *where, calls, payload in found}


def page(seen: Sequence[Seen], seconds: dict[str, float]) -> str:
    """docs/systems.md: what stands above its first table stays."""
    head = PAGE.read_text("utf-8").partition("| system |")[0].rstrip() + "\n"
    text = [head, "| system | version | pass | known defect | cannot run | s |", "|---|---|---|---|---|---|"]
    for system, took_s in seconds.items():
        mine = [one for one in seen if one.cell.system == system]
        package = mine[0].cell.package
        counts = [str(sum(one.result == result for one in mine)) for result in (PASSED, DEFECT, CANNOT)]
        version = importlib.metadata.version(package)
        text.append(f"| {system} | {package} {version} | {' | '.join(counts)} | {took_s:.0f} |")
    text += [f"| {system} | | {NOT_RUN}: {why}: `{command}` | | | |" for system, why, command in ELSEWHERE]
    for system in seconds:
        text += ["", f"## {system}", "", "| feature | subject | case | engine | result | calls | bytes |"]
        text.append("|---|---|---|---|---|---|---|")
        below: list[str] = []
        for cell, result, why, calls, payload in (one for one in seen if one.cell.system == system):
            ledger = "| |" if result != PASSED else f"{calls} | {payload} |" if cell.kept else "- | - |"
            text.append(f"| {cell.feature} | `{cell.subject}` | `{cell.case}` | {cell.engine} | {result} | {ledger}")
            if why:
                line = f"- `{cell.subject}` with `{cell.case}`: {why}"
                below += textwrap.wrap(line, 120, subsequent_indent="  ", break_on_hyphens=False)
        text += ["", *below] if below else []
    return "\n".join(text) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix, print each cell, write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.systems", description="The matrix of systems.")
    parser.add_argument("--quick", action="store_true", help="a few cells of each system")
    parser.add_argument("--only", default="", metavar="SYSTEM", help="systems whose name contains this")
    parser.add_argument("--out", type=Path, help="where the page goes (a full run: docs/systems.md)")
    parser.add_argument("--accept", action="store_true", help="take calls and bytes as they are now")
    asked = parser.parse_args(arguments)
    chosen = [cell for cell in cells() if asked.only.lower() in cell.system.lower() and cell.quick >= asked.quick]
    if not chosen:
        legal = ", ".join(dict.fromkeys(cell.system for cell in cells()))
        print(f"--only {asked.only}: no system has this in its name; legal: {legal}", file=sys.stderr)
        return 2
    stored = {} if asked.accept else stored_on(PAGE)
    seen: list[Seen] = []
    seconds: dict[str, float] = {}
    for system, mine in groupby(chosen, lambda cell: cell.system):
        began_s = time.monotonic()
        for _, group in groupby(sorted(mine, key=sorting), sorting):
            for one in run(list(group), stored):
                seen.append(one)
                print(f"{system}: {' '.join(key(one.cell))}: {one.result} {one.why}".rstrip(), flush=True)
        seconds[system] = time.monotonic() - began_s
    seen.sort(key=lambda one: chosen.index(one.cell))
    counts = {result: sum(one.result == result for one in seen) for result in (PASSED, DEFECT, CANNOT, FAILED)}
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    if path := asked.out or (None if asked.quick or asked.only or counts[FAILED] else PAGE):
        path.write_text(page(seen, seconds), encoding="utf-8")
    return int(counts[FAILED] > 0)


def sorting(cell: Cell) -> tuple[str, str, str]:
    """Cells that one command runs are equal in these."""
    return cell.subject, cell.engine, cell.expected


if __name__ == "__main__":
    sys.exit(main())
