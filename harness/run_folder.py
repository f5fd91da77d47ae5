"""A run folder, `<out>/<time>-<name>`, to which the link `<out>/latest` leads."""

import csv
import datetime
import errno
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from shardproof.harness.errors import MachineError, RequestError

LAYOUT = 3
"""The layout number of a run folder, in its env.json. A reader refuses folders with another one."""
_RUNS_A_SECOND = 1000
DISK_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a disk that is full, or broken."""


def new_run_folder(out: Path, name: str) -> Path:
    """A new folder: a second run within a second gets a number. Raises RequestError or MachineError (guard_writing).

    A new `out` gets a `.gitignore`, so that runs stay out of the user's repository.
    """
    stem = f"{datetime.datetime.now().strftime('%Y%m%d-%H%M%S')}-{safe_name(name)}"
    with guard_writing(out):
        is_new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        if is_new:
            (out / ".gitignore").write_text("*\n", encoding="utf-8")
        for attempt in range(1, _RUNS_A_SECOND):
            path = out / (stem if attempt == 1 else f"{stem}-{attempt}")
            with suppress(FileExistsError):  # taken: the next number
                path.mkdir()
                return path
    raise RequestError(f"out={out}: a thousand runs named {stem} are in it; legal: another folder with --out")


def link_latest(folder: Path) -> str:
    """Point `latest` to the folder atomically. Returns why that failed, as on a file system without links; else ""."""
    latest, fresh = folder.parent / "latest", folder.parent / f".latest-{folder.name}"
    try:
        fresh.symlink_to(folder.name, target_is_directory=True)
        fresh.replace(latest)
    except OSError as problem:
        fresh.unlink(missing_ok=True)
        return f"{latest} does not point to this run: {problem.strerror}"
    return ""


def safe_name(name: str) -> str:
    """A name as part of a folder's name: letters, digits, ., _ and - only, at most 80 of them."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "run"


@contextmanager
def guard_writing(out: Path) -> Iterator[None]:
    """Write the run folder inside. Raises RequestError with the folder and the reason if that is impossible.

    A disk that is full, or fails, is a failure of the machine: MachineError.
    """
    try:
        yield
    except OSError as problem:
        reason = problem.strerror or str(problem)
        if problem.errno in DISK_FAILED:
            raise MachineError(f"out={out}: the run folder cannot be written ({reason})") from problem
        raise RequestError(
            f"out={out}: the run folder cannot be written ({reason}); legal: a folder with room and write permission"
        ) from problem


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """The rows as lines of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
