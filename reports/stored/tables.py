"""Tables of a run folder as frames: a CSV file, and one of every rank. Raises RunFolderError for what is no such table.

Apart from the other files of a folder, for pandas is loaded here.
"""

import io
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from shardproof.reports.stored.files import RunFolderError, part_folders, text_of_ranks, whole_lines


def csv_table(path: Path, types: dict[str, str], needed: Iterable[str], notes: list[str]) -> pd.DataFrame:
    """The rows of a CSV file; `types` by column, "str" where the file may hold anything; an empty file has no row.

    Raises RunFolderError for a file that is cut, lacks a column, or holds a wrong value.
    """
    data = whole_lines(path, notes)
    header = data.split(b"\n", 1)[0].decode("utf-8").rstrip("\r").split(",")
    if not data:
        return pd.DataFrame({name: pd.Series(dtype=types[name]) for name in needed})
    if missing := [name for name in needed if name not in header]:
        raise RunFolderError(f"{path}: the column {missing[0]} is missing; it needs {','.join(needed)}")
    nullable = ("Int64", "Float64", "boolean")
    absent = {name: [""] for name in header if types.get(name) in nullable or not types}
    try:
        return pd.read_csv(
            io.BytesIO(data),
            dtype={name: kind for name, kind in types.items() if name in header},
            keep_default_na=False,
            na_values=absent,
        )
    except (ValueError, OverflowError) as error:
        raise RunFolderError(f"{path}: not the table it should be ({' '.join(str(error).split())})") from error


def join_ranks(run: Path, name: str, types: Mapping[str, str], notes: list[str]) -> pd.DataFrame:
    """A table of all ranks, with the column `rank`. Raises RunFolderError for a table that no recorder wrote."""
    frames, cut = [], []
    for rank, path in part_folders(run).items():
        if not (path / name).is_file():
            continue
        mended: list[str] = []
        frame = csv_table(path / name, dict(types), types, mended)
        cut += [rank] if mended else []
        frames.append(frame if "rank" in types else frame.assign(rank=rank))
    if cut:
        notes.append(f"{name} of {text_of_ranks(cut)}: the last line is cut and left out: {len(cut)} in all")
    if frames := [frame for frame in frames if len(frame)]:
        return pd.concat(frames, ignore_index=True)
    return pd.DataFrame({column: pd.Series(dtype=kind) for column, kind in {**types, "rank": "int64"}.items()})
