"""Baselines: snapshots kept as text, to be stored beside the code and read in a pull request.

`<folder>/<name>/` with baseline.json (where from, versions, machine), cases.csv, events.csv (the calls of every module;
sorted, without times: equal ledgers give equal files), times.csv, memory.csv, and of a recorded program callers.csv. A
baseline is found by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from harness.errors import RequestError
from reports.comparing.sides import FOLDER, MARK, check_name, side_folder
from reports.comparing.snapshot import CALLED, EVENT_TYPES, MEMORY_TYPES, TIME_TYPES, Snapshot, members, snapshot
from reports.stored.files import RunFolderError, csv_table, json_object, shown
from reports.stored.frames import load

_CALLERS = "callers.csv"
_CASE_TYPES = {"case": "str", "mode": "str", "world_size": "int64"}
_TABLES: Mapping[str, Mapping[str, str]] = {
    "cases": _CASE_TYPES,
    "events": EVENT_TYPES,
    "times": TIME_TYPES,
    "memory": MEMORY_TYPES,
}


def side(name: str, folder: str = FOLDER) -> Snapshot:
    """One side of a comparison: a run folder, the folder of a baseline, or a baseline's name.

    Raises RunFolderError when there is none.
    """
    path = side_folder(name, folder)
    return _read(path, name) if (path / MARK).is_file() else snapshot(load(path), name)


def save(kept: Snapshot, name: str, folder: str = FOLDER) -> Path:
    """Store a snapshot under this name, in place of an older one; returns its folder.

    Raises RequestError for a run without events, an illegal name, or a folder that cannot be written.
    """
    check_name(name)
    if kept.cases.empty or kept.events.empty:
        raise RequestError(f"run {kept.name}: holds no event, so it is no baseline; legal: a run that communicated")
    path = Path(folder) / name
    try:
        if path.is_dir() and any(path.iterdir()) and not (path / MARK).is_file():
            raise RequestError(f"baseline={path}: the folder holds something else; legal: another name")
        path.mkdir(parents=True, exist_ok=True)
        (path / MARK).unlink(missing_ok=True)  # until all is written there is no baseline
        for table, types in _TABLES.items():
            frame: pd.DataFrame = getattr(kept, table)
            frame[list(types)].to_csv(path / f"{table}.csv", index=False, lineterminator="\n")
        if kept.callers:
            lines = pd.DataFrame([(*place, " ".join(callers)) for place, callers in kept.callers.items()])
            lines.to_csv(path / _CALLERS, index=False, header=[*CALLED, "callers"], lineterminator="\n")
        env = json.dumps({"from": kept.name, "env": kept.env}, indent=2, sort_keys=True)
        (path / MARK).write_text(env + "\n", encoding="utf-8")
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise RequestError(
            f"baseline={shown(path)}: cannot be written ({reason}); legal: a writable folder"
        ) from problem
    return path


def write_events(events: pd.DataFrame, path: Path) -> None:
    """Store counted events alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    events[list(EVENT_TYPES)].to_csv(path, index=False, lineterminator="\n")


def read_events(path: Path) -> pd.DataFrame:
    """Counted events that `write_events` stored. Raises RunFolderError when the file is torn or no such file."""
    return _table(path, EVENT_TYPES)


def _read(path: Path, name: str) -> Snapshot:
    mark = json_object(path / MARK)
    env = mark.get("env")
    if not isinstance(env, dict):
        raise RunFolderError(f"{path / MARK}: needs the object `env`; write the baseline again with --save-baseline")
    cases, events, times, memory = (_table(path / f"{table}.csv", types) for table, types in _TABLES.items())
    callers = {}
    if (path / _CALLERS).is_file():
        lines = _table(path / _CALLERS, dict.fromkeys((*CALLED, "callers"), "str"))
        callers = {tuple(place): tuple(found.split()) for *place, found in lines.itertuples(index=False, name=None)}
    return Snapshot(name=name, env=env, cases=cases, events=events, times=times, memory=memory, callers=callers)


def _table(path: Path, types: Mapping[str, str]) -> pd.DataFrame:
    """A table that must be whole: a baseline is written once, so a cut one was harmed and proves nothing."""
    again = "write the baseline again with --save-baseline"
    if not path.is_file():
        raise RunFolderError(f"{path}: is missing; {again}")
    notes: list[str] = []
    frame = csv_table(path, dict(types), types, notes)
    if notes or not path.stat().st_size:
        raise RunFolderError(f"{path}: is cut; {again}")
    try:
        for name in ("ranks", "steps", "microbatches"):
            if name in frame:
                for text in frame[name].unique():
                    members(text)
    except ValueError as problem:
        raise RunFolderError(f"{path}: {name} holds {text!r}, which names no numbers; {again}") from problem
    return frame
