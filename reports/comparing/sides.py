"""The sides of a comparison by name: run folders and baselines, found and refused without pandas."""

from __future__ import annotations

import re
from pathlib import Path

from harness.errors import RequestError
from reports.stored.files import RunFolderError, looking, run_folder, shown

FOLDER = "baselines"
MARK = "baseline.json"
"""The file that makes a folder a baseline, written last."""


def side_folder(name: str, folder: str = FOLDER) -> Path:
    """The run folder or baseline of this path, or the baseline of this name in a folder of baselines.

    Raises RunFolderError when there is none, naming the baselines that there are.
    """
    path, stored = Path(name), Path(folder) / name
    with looking(name):
        if not path.is_dir() and _legal(name) and (stored / MARK).is_file():
            path = stored
        there, kept = path.is_dir(), (path / MARK).is_file()
    if kept:
        return path
    if there:
        return run_folder(path, matrix=False)
    known = sorted(found.parent.name for found in Path(folder).glob(f"*/{MARK}"))
    legal = f"a run folder, as runs/latest, or a baseline of {folder}: {', '.join(known) or 'none is there yet'}"
    raise RunFolderError(f"run {shown(name)}: no such run folder and no baseline of this name; legal: {legal}")


def check_name(name: str) -> None:
    """Raise RequestError unless a baseline can be called so."""
    if not _legal(name):
        rule = "must be a name of at most 100 letters, digits, dots, dashes"
        raise RequestError(f"baseline={shown(name)}: {rule}; legal: main")


def _legal(name: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name))
