"""`make compat`: shardproof under every release of torch that it names, each in an environment of its own.

    python3 -m bench.compat [--only 3.12:2.14] [--keep]

Needs no installed package. An environment is made in .compat/, used and deleted (each holds up to 6 GB; --keep keeps
them, and uses those that are there). Prints one row a step: python, torch, step, result, seconds. Exit status 1 when a
step failed or nothing could be run; an interpreter that is not here is `not run`, with the reason. Every step is
bounded in time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / ".compat"
MATRIX = (
    *(("3.12", torch) for torch in ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")),
    ("3.11", "2.13.0"),
    ("3.13", "2.14.1"),
)
"""Python and torch."""
_CASES = (
    *("mode=tp tp=2", "mode=tp-sp tp=2", "preset=tiny-internlm2 mode=isp tp=2", "mode=tp tp=2 dp=2 zero=2"),
    *("mode=tp-sp tp=1 cp=2 seq=32", "mode=tp tp=1 pp=2 micro=3"),
)
_PROGRAM = str(ROOT / "tests" / "harness" / "programs" / "scripts" / "fsdp2.py")
_TESTS = (
    "tests/harness/shapes/test_torch_internals.py",
    "tests/harness/shapes/test_unmapped.py",
    "tests/harness/threads/test_inproc_calls.py",
)
_INSTALL_S, _STEP_S = 1200.0, 600.0
PASSED, FAILED, NOT_RUN = "pass", "FAIL", "not run"
Command = Sequence[str]


class Row(NamedTuple):
    """How a step went; `why` is the end of its output where it failed, or why it was not run."""

    python: str
    torch: str
    step: str
    result: str
    seconds: float = 0.0
    why: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix and print the table."""
    parser = argparse.ArgumentParser(prog="bench.compat", description="shardproof under every tested torch")
    parser.add_argument("--only", default="", help="rows whose PYTHON:TORCH begins so, such as 3.12:2.14")
    parser.add_argument("--keep", action="store_true", help="keep the environments in .compat/, and use kept ones")
    asked = parser.parse_args(arguments)
    chosen = [pair for pair in MATRIX if ":".join(pair).startswith(asked.only)]
    if not chosen:
        legal = " ".join(":".join(pair) for pair in MATRIX)
        print(f"--only {asked.only}: no row begins so; legal: {legal}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    for python, torch in chosen:
        for row in _rows(python, torch, keep=asked.keep):
            print(f"{row.python} torch {row.torch} {row.step}: {row.result} {row.seconds:.0f} s", flush=True)
            rows.append(row)
    print("\n" + table(rows))
    results = {row.result for row in rows}
    return 1 if FAILED in results or results == {NOT_RUN} else 0


def table(rows: Sequence[Row]) -> str:
    """The rows in columns, and below them why what did not pass did not."""
    cells = [("python", "torch", "step", "result", "seconds")]
    cells += [(row.python, row.torch, row.step, row.result, f"{row.seconds:.0f}") for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    reasons = [f"{row.result} {row.python} torch {row.torch} {row.step}: {row.why}" for row in rows if row.why]
    return "\n".join([*lines, *reasons])


def interpreter(version: str) -> tuple[str, str]:
    """The path of a Python of this version ("3.12"), or "" and why there is none: on PATH first, then pyenv's."""
    home = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [shutil.which(f"python{version}") or "", sys.executable]
    found += [str(path) for path in sorted(home.glob(f"versions/{version}*/bin/python"), reverse=True)]
    question = "import sys, venv; print('{}.{}'.format(*sys.version_info))"
    for path in filter(None, found):
        told = subprocess.run([path, "-c", question], capture_output=True, text=True, check=False, timeout=60)
        if told.returncode == 0 and told.stdout.strip() == version:
            return path, ""
    return "", f"no python{version} on PATH and none below {home}/versions"


def _rows(python: str, torch: str, *, keep: bool) -> Iterator[Row]:
    path, why = interpreter(python)
    if not path:
        yield Row(python, torch, "all", NOT_RUN, 0.0, why)
        return
    place = PLACE / f"py{python}-torch{torch}"
    kept = keep and (place / "ready").exists()
    steps = [("installed before", [], 0.0) if kept else ("install", _install(path, torch, place), _INSTALL_S)]
    steps += [(name, [command], _STEP_S) for name, command in _steps(place / "bin")]
    try:
        for name, commands, limit_s in steps:
            began_s = time.monotonic()
            why = next(filter(None, (_ended(command, limit_s, PLACE) for command in commands)), "")
            yield Row(python, torch, name, FAILED if why else PASSED, time.monotonic() - began_s, why)
            if name == "install" and why:
                return
            (place / "ready").touch()
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def _install(python: str, torch: str, place: Path) -> list[Command]:
    """Make the environment: this torch, the pins of constraints.txt but torch's own, and this checkout."""
    PLACE.mkdir(exist_ok=True)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
    (PLACE / "constraints.txt").write_text("\n".join(pins) + "\n")
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    others = [name for name in needed if not name.startswith("torch>")]
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return [
        [python, "-m", "venv", "--clear", str(place)],
        [*pip, "--constraint", str(PLACE / "constraints.txt"), f"torch=={torch}", *others],
        [*pip, "--no-deps", "--editable", str(ROOT)],
    ]


def _steps(binaries: Path) -> Iterator[tuple[str, Command]]:
    """The steps of one environment: name and command."""
    shardproof, python = str(binaries / "shardproof"), str(binaries / "python")
    yield "run", [shardproof, "run"]
    yield "run --engine pool", [shardproof, "run", "--engine", "pool", *_CASES]
    yield "run --engine dry", [shardproof, "run", "--engine", "dry", *_CASES]
    launch = [python, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--master-port", "29611"]
    yield "run --engine torchrun", [*launch, "-m", "shardproof", "run", "--engine", "torchrun", _CASES[0]]
    yield "record", [*launch, "-m", "shardproof.record", _PROGRAM]
    yield "tests of the internals", [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_TESTS]


def _ended(command: Command, limit_s: float, folder: Path) -> str:
    """Run a command to its end: "" when it succeeded, else its exit status and last lines. It may not outlive us."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    words = {"cwd": ROOT if "pytest" in command else folder, "env": environment, "start_new_session": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    process = subprocess.Popen(command, **words, **pipes)  # type: ignore[call-overload]
    why = ""
    try:
        said, _ = process.communicate(timeout=limit_s)
        if process.returncode:
            why = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, why = process.communicate()[0], f"no end within {limit_s:.0f} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return why and f"{why}: {' | '.join(lines[-8:])}"


if __name__ == "__main__":
    sys.exit(main())
