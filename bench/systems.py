"""The matrix of other people's systems: the result of each cell under `shardproof run`, and the page about it.

    python -m bench.systems [--quick] [--only SYSTEM] [--out FILE] [--accept] [--environments FOLDER]

A cell is a case of a subject of `suites/subjects` on an engine, as `bench/systems.txt` lists them. Its result is `pass`
when `shardproof run` ends with status 0, `known defect` when it fails and names the module of the finding. The result
is `cannot run` when it ends in the error of its row. Anything else is FAIL, and so are calls or bytes other than those
that the page holds from earlier runs (`--accept` takes the new ones). Exit status 1 for a FAIL.

A system runs where its Python and its packages are: here, or in an environment that is made for it and kept. Without
that Python, or where pip fails, it is `not run here`. A run without --quick and without a FAIL writes the page,
docs/systems.md, in which row and section of a system that was not run stay.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from shardproof.harness.verdicts.facts import Fact
from shardproof.harness.verdicts.verdict import record_of
from shardproof.harness.verdicts.words import join_facts

ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 1200.0


def install(python: str, place: Path, packages: Sequence[str]) -> Iterator[list[str]]:
    """The commands that make an environment at `place`: these packages, this checkout, and what it needs
    beside them.

    A package that is named without a version (`torch==2.14.1`) gets that of constraints.txt.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    chosen = {_name(package) for package in packages}
    versions = {_name(package) for package in packages if "==" in package}
    pins = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if _name(line) not in versions]
    constraint = place.with_name(f"{place.name}.txt")
    constraint.write_text("\n".join(pins) + "\n", encoding="utf-8")
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    others = [package for package in needed if _name(package) not in chosen]
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    yield [python, "-m", "venv", "--clear", str(place)]
    yield [*pip, "--constraint", str(constraint), *packages, *others]
    yield [*pip, "--no-deps", "--editable", str(ROOT)]


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower()


def run_to_end(command: Sequence[str], limit_s: float = _LIMIT_S, folder: Path | None = None) -> str:
    """Run a command in a folder to its end. Returns "" if it succeeded, otherwise its exit status and last lines.

    After `limit_s` seconds the command is ended with everything that it started.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    bounded = ["timeout", "--signal=KILL", str(limit_s), *command]
    done = subprocess.run(bounded, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if not done.returncode:
        return ""
    how = f"no end within {limit_s:.0f} s" if done.returncode in (137, -9) else f"exit status {done.returncode}"
    return f"{how}: {' | '.join(lines[-8:])}"


PASSED, DEFECT = "pass", "known defect"
MEGATRON, TABLE = ROOT / "docs" / "megatron.md", ROOT / "bench" / "systems.txt"
THIS = "python{}.{}".format(*sys.version_info)


class System(NamedTuple):
    """A system: its packages, first its own, and its Python if that is another than the one that runs this command.

    Packages name a version if it is not that of constraints.txt. `checkout` is the variable that names its code.
    """

    name: str
    packages: tuple[str, ...]
    python: str = ""
    checkout: str = ""

    @property
    def package(self) -> str:
        """The name of its own package; for a checkout, the word before its commit."""
        return "commit" if self.checkout else self.packages[0].partition("==")[0]

    @property
    def is_here(self) -> bool:
        """Whether the running Python is the system's own and has its packages."""
        return self.python in {"", THIS} and all(map(_is_installed, self.packages))


class Cell(NamedTuple):
    """A case of a subject on an engine. If it is not expected to pass, its output must have the text `needle`.

    `kept`: whether the page has its calls and bytes.
    """

    system: System
    subject: str
    feature: str
    case: str
    engine: str = "inproc"
    quick: bool = False
    expected: str = PASSED
    needle: str = ""
    finding: str = ""
    kept: bool = True


def read_cells() -> Iterator[Cell]:
    """Every cell, system by system."""
    for block in TABLE.read_text("utf-8").split("\n# ")[1:]:
        heading, *rows = block.splitlines()
        name, packages, python = (*heading.split(": "), "")[:3]
        words = packages.split()
        variable = next((word[1:] for word in words if word.startswith("$")), "")
        system = System(name, tuple(word for word in words if not word.startswith("$")), python, variable)
        for row in filter(None, rows):
            subject, feature, case, marks = (*row.split(" | "), "")[:4]
            kind, _, rest = marks.partition(": ")
            needle, _, finding = rest.partition(": ")
            expected, engine = kind if rest else PASSED, "pool" if "pool" in marks.split() else "inproc"
            start, _, values = case.rstrip("}").partition("{")
            for value in values.split(","):
                where = (system, subject, feature, start + value, engine)
                yield Cell(*where, "quick" in marks.split(), expected, needle, finding, "unkept" not in marks.split())
        if "experts" in name and not python:
            known = re.findall(r"^\| (.+) \| `(mcore_\w+)` \| `(.+)` \| `(.+)` \|$", MEGATRON.read_text("utf-8"), re.M)
            for defect, subject, words, module in known:
                place = (system, subject, "as in megatron.md", f"{words} steps=1 micro=1")
                yield Cell(*place, expected=DEFECT, needle=module, finding=f"docs/megatron.md: {defect}")


def _is_installed(package: str) -> bool:
    name, _, wanted = package.partition("==")
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return not wanted or found.partition("+")[0] == wanted


PAGE = ROOT / "docs" / "systems.md"
CANNOT, FAILED, NOT_RUN = "cannot run", "FAIL", "not run here"
CHECKS = {"forward", "parameter_gradients", "update", "replicas", "ledger"}
"""The checks that a passing cell must at least have compared."""


Ledger = tuple[int, int]
"""How many calls a rank makes in forward and backward, and the payload bytes of all its calls."""


class Seen(NamedTuple):
    """Result of a cell and why, calls in forward and backward and payload bytes of a rank."""

    cell: Cell
    result: str
    why: str = ""
    calls: int = 0
    payload_bytes: int = 0


def find_python(name: str) -> str:
    """A Python of this name, such as python3.12, that runs; "" if there is none.

    It is on PATH, or was installed by pyenv, uv or Debian. A shim of pyenv is on PATH even if its version is not
    chosen, and then does not run.
    """
    home = Path.home()
    pyenv, uv = Path(os.environ.get("PYENV_ROOT", home / ".pyenv")), home / ".local" / "share" / "uv" / "python"
    places = [
        path
        for root in (pyenv / "versions", Path(os.environ.get("UV_PYTHON_INSTALL_DIR", uv)))
        for path in sorted(root.glob(f"*/bin/{name}"), reverse=True)
    ]
    for place in filter(None, (shutil.which(name), *map(str, places), f"/usr/bin/{name}")):
        if Path(place).exists() and not run_to_end([place, "-c", ""], limit_s=60.0):
            return place
    return ""


def interpreter(system: System, folder: Path) -> tuple[str, str]:
    """The Python that has a system's packages, and the version of its own package; otherwise "" and the reason.

    It is the running one, or that of an environment below `folder`.
    """
    if system.checkout and not os.environ.get(system.checkout):
        return "", f"{system.checkout} names no checkout"
    if system.checkout and system.is_here:
        log = ["git", "-C", os.environ[system.checkout], "log", "-1", "--format=%h"]
        commit = subprocess.run(log, capture_output=True, text=True, check=False).stdout.strip()
        return sys.executable, commit or "unknown"
    if system.is_here:
        return sys.executable, importlib.metadata.version(system.package)
    python = system.python or THIS
    path = find_python(python) if system.python else sys.executable
    if not path:
        return "", f"no {python} on PATH, nor one of pyenv, uv or Debian"
    place = folder / "-".join((python, *system.packages)).replace("==", "")
    own = str(place / "bin" / "python")
    if not (place / "ready").exists():
        print(f"{system.name}: {place} is made", flush=True)
        if why := next(filter(None, map(run_to_end, install(path, place, system.packages))), ""):
            return "", why
        (place / "ready").touch()
    asked = [own, "-c", f"import importlib.metadata as m; print(m.version({system.package!r}))"]
    return own, subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def run_cells(group: Sequence[Cell], stored: dict[tuple[str, ...], Ledger], python: str) -> Iterator[Seen]:
    """Run cells of one subject, engine and expectation by one command. If some of them fail, those
    that pass run again.
    """
    first, words = group[0], [cell.case for cell in group]
    with tempfile.TemporaryDirectory() as folder:
        subject = f"shardproof.suites.subjects.{first.subject}:subject"
        options = ["--subject", subject, "--engine", first.engine, "--when", "0", "--timeout", "200", "--json"]
        command = [python, "-m", "shardproof", "run", *words, *options]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        _, start, rest = done.stdout.rpartition('{\n  "exit_status"')  # libraries may print before it
        if done.returncode not in (0, 1) or not start:
            yield from (Seen(cell, FAILED, " ".join(done.stderr.split()[-30:])) for cell in group)
            return
        summary = json.loads(start + rest)
        lines = (Path(folder) / summary["run"] / "verdicts.jsonl").read_text("utf-8").splitlines()
    verdicts = [row for row in map(json.loads, lines) if "verdict" in row]
    again = []
    for cell in group:  # a case's text leaves defaults out
        mine = set(cell.case.split())
        row = max(
            (row for row in summary["cases"] if set(row["case"].split()) <= mine), key=lambda row: len(row["case"])
        )
        if row["verdict"] == PASSED and done.returncode and cell.expected == PASSED:
            again.append(cell)
        else:
            yield judge_cell(cell, row, [one for one in verdicts if one["case"] == row["case"]], stored.get(key(cell)))
    if again:
        yield from run_cells(again, stored, python)


def _statement_of(row: dict[str, Any]) -> str:
    """A row of verdicts.jsonl in words."""
    return join_facts([record_of(Fact, one) for one in row["facts"]])


def judge_cell(cell: Cell, row: dict[str, Any], verdicts: Sequence[dict[str, Any]], stored: Ledger | None) -> Seen:
    """The result of a cell and why: by its case's row, its verdicts by check, and the ledger of earlier runs."""
    bad = [one for one in verdicts if one["verdict"] != PASSED]
    found = next((one for one in bad if cell.needle in json.dumps([_statement_of(one), one.get("failure")])), None)
    if cell.expected != PASSED and row["verdict"] == "fail" and found:
        return Seen(cell, cell.expected, cell.finding or _statement_of(found))
    if cell.expected != PASSED or row["verdict"] != PASSED:
        return Seen(cell, FAILED, " ".join((f"the verdict is {row['verdict']}", *map(_statement_of, bad[:2]))))
    ledger = (int(row["forward_calls"] + row["backward_calls"]), int(row["payload_bytes"]))
    if missing := CHECKS - {one["check"] for one in verdicts if one["verdict"] == PASSED}:
        return Seen(cell, FAILED, f"not compared: {', '.join(sorted(missing))}")
    if stored not in (None, ledger):
        return Seen(cell, FAILED, f"calls and bytes are {ledger}, and on the page {stored}")
    return Seen(cell, PASSED, "", *ledger)


sorting = attrgetter("subject", "engine", "expected")
"""Cells that are equal in these are run by one command."""


def key(cell: Cell) -> tuple[str, ...]:
    return cell.system.name, cell.subject, cell.case, cell.engine


def sections(page: Path) -> dict[str, str]:
    """The texts below the headings of a page, by system."""
    blocks = page.read_text("utf-8").split("\n## ")[1:] if page.exists() else []
    return {name: rest.strip("\n") for name, _, rest in (block.partition("\n") for block in blocks)}


def stored_on(page: Path) -> dict[tuple[str, ...], Ledger]:
    """The calls and bytes of every passing cell that the page has."""
    row = re.compile(r"^\|[^|]*\| `(\w+)` \| `([^`]+)` \| (\w+) \| pass \| (\d+) \| (\d+) \|$", re.MULTILINE)
    found = [(name, *cell) for name, section in sections(page).items() for cell in row.findall(section)]
    return {tuple(where): (int(calls), int(payload)) for *where, calls, payload in found}


def page(seen: Sequence[Seen], took: dict[System, tuple[str, float]], absent: dict[System, str]) -> str:
    """The text of docs/systems.md. What is above its first table stays, and so do the row and section of a system that
    was not run. `took` has version and seconds of systems that were run, `absent` why others were not.
    """
    head, _, older = PAGE.read_text("utf-8").partition("| system |")
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in older.partition("\n## ")[0].splitlines()[2:]}
    below = sections(PAGE)
    for system, (version, seconds) in took.items():
        mine = [one for one in seen if one.cell.system == system]
        counts = " | ".join(str(sum(one.result == result for one in mine)) for result in (PASSED, DEFECT, CANNOT))
        python = f", {system.python}" if system.python else ""
        rows[system.name] = f"| {system.name} | {system.package} {version}{python} | {counts} | {seconds:.0f} |"
        below[system.name] = "\n".join(_section(mine))
    for system, why in absent.items():
        rows.setdefault(system.name, f"| {system.name} | {' '.join(system.packages)} | {NOT_RUN}: {why} | | | |")
    names = [name for name in dict.fromkeys(cell.system.name for cell in read_cells()) if name in rows]
    table = ["| system | version | pass | known defect | cannot run | s |", "|---|---|---|---|---|---|"]
    table += [rows[name] for name in names]
    texts = [f"## {name}\n\n{below[name].strip()}" for name in names if name in below]
    return "\n\n".join([head.rstrip(), "\n".join(table), *texts]) + "\n"


def _section(seen: Sequence[Seen]) -> Iterator[str]:
    yield "| feature | subject | case | engine | result | calls | bytes |"
    yield "|---|---|---|---|---|---|---|"
    for cell, result, _, calls, payload in seen:
        ledger = "| |" if result != PASSED else f"{calls} | {payload} |" if cell.kept else "- | - |"
        yield f"| {cell.feature} | `{cell.subject}` | `{cell.case}` | {cell.engine} | {result} | {ledger}"
    reasons = [f"- `{one.cell.subject}` with `{one.cell.case}`: {one.why}" for one in seen if one.why]
    yield from [""] if reasons else []
    for reason in reasons:
        yield from textwrap.wrap(reason, 120, subsequent_indent="  ", break_on_hyphens=False)


_FOLDER = "where environments are made and kept, up to 8 GB each (build/systems)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix, print each cell, write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.systems", description="The matrix of systems.")
    parser.add_argument("--quick", action="store_true", help="a few cells of each system")
    parser.add_argument("--only", default="", metavar="SYSTEM", help="systems whose name contains this")
    parser.add_argument("--out", type=Path, help="where the page goes (without --quick: docs/systems.md)")
    parser.add_argument("--accept", action="store_true", help="take calls and bytes as they are now")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "systems", metavar="FOLDER", help=_FOLDER)
    asked = parser.parse_args(arguments)
    chosen = [
        cell for cell in read_cells() if asked.only.lower() in cell.system.name.lower() and cell.quick >= asked.quick
    ]
    if not chosen:
        legal = ", ".join(dict.fromkeys(cell.system.name for cell in read_cells()))
        print(f"--only {asked.only}: no system has this in its name; legal: {legal}", file=sys.stderr)
        return 2
    stored = {} if asked.accept else stored_on(PAGE)
    seen: list[Seen] = []
    took: dict[System, tuple[str, float]] = {}
    absent: dict[System, str] = {}

    def verify(system: System) -> None:
        python, version_or_reason = interpreter(system, asked.environments)
        if not python:
            absent[system] = version_or_reason
            print(f"{system.name}: {NOT_RUN}: {version_or_reason}", flush=True)
            return
        began_s = time.monotonic()
        mine = [cell for cell in chosen if cell.system == system]
        for _, group in groupby(sorted(mine, key=sorting), sorting):
            for one in run_cells(list(group), stored, python):
                seen.append(one)
                print(f"{system.name}: {' '.join(key(one.cell)[1:])}: {one.result} {one.why}".rstrip(), flush=True)
        took[system] = (version_or_reason, time.monotonic() - began_s)

    with ThreadPoolExecutor(2) as pool:  # several systems at a time: a cell computes on one core
        list(pool.map(verify, dict.fromkeys(cell.system for cell in chosen)))
    seen.sort(key=lambda one: chosen.index(one.cell))
    counts = {result: sum(one.result == result for one in seen) for result in (PASSED, DEFECT, CANNOT, FAILED)}
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    if path := asked.out or (None if asked.quick or counts[FAILED] else PAGE):
        path.write_text(page(seen, took, absent), encoding="utf-8")
    return int(counts[FAILED] > 0)


if __name__ == "__main__":
    sys.exit(main())
