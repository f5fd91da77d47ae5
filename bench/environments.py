"""Environments of this checkout with chosen packages and another Python, made by venv and pip, and bounded commands."""

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 1200.0


def install(python: str, place: Path, packages: Sequence[str]) -> Iterator[list[str]]:
    """The commands that make an environment at `place`: these packages, what this checkout needs beside them, and the
    checkout itself. Packages that are not named here with a version (`torch==2.14.1`) have that of constraints.txt.
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


def ended(command: Sequence[str], limit_s: float = _LIMIT_S, folder: Path | None = None) -> str:
    """Run a command in a folder to its end: "" when it succeeded, else its exit status and last lines. `timeout` ends
    it and what it started.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    bounded = ["timeout", "--signal=KILL", str(limit_s), *command]
    done = subprocess.run(bounded, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if not done.returncode:
        return ""
    how = f"no end within {limit_s:.0f} s" if done.returncode in (137, -9) else f"exit status {done.returncode}"
    return f"{how}: {' | '.join(lines[-8:])}"
