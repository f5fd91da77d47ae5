"""A recorded program's run folder: one part a rank, `ranks/<rank>/`, which that rank wrote (harness.programs.part).

Read with the care that a killed writer needs: a line cut in its middle is left out and counted, a rank without an
orderly end is named once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import ranks_text
from reports.stored.files import csv_table, json_object

STEP_TYPES = {"step": "int64", "start_us": "float64", "updated_us": "Float64", "microbatches": "int64"}
GROUP_TYPES = {"axis": "str", "ranks": "str"}


def recorded(run: Path) -> bool:
    """Whether this is the run folder of a recorded program."""
    return (run / "ranks").is_dir()


def ranks(run: Path) -> dict[int, Path]:
    """Rank -> the folder of its part, in order of ranks."""
    found = {int(path.name): path for path in (run / "ranks").iterdir() if path.name.isdigit()}
    return {rank: found[rank] for rank in sorted(found)}


def joined(run: Path, name: str, types: Mapping[str, str], notes: list[str]) -> pd.DataFrame:
    """A table of all ranks, with the column `rank`. Raises RunFolderError for a table that no recorder wrote."""
    frames, cut = [], []
    for rank, path in ranks(run).items():
        if not (path / name).is_file():
            continue
        mended: list[str] = []
        frame = csv_table(path / name, dict(types), types, mended)
        cut += [rank] if mended else []
        frames.append(frame if "rank" in types else frame.assign(rank=rank))
    if cut:
        notes.append(f"{name} of {_ranks(cut)}: the last line is cut and left out: {len(cut)} in all")
    if frames := [frame for frame in frames if len(frame)]:
        return pd.concat(frames, ignore_index=True)
    return pd.DataFrame({column: pd.Series(dtype=kind) for column, kind in {**types, "rank": "int64"}.items()})


def ends(run: Path) -> dict[int, dict[str, Any]]:
    """Rank -> what it wrote at its orderly end; ranks without one are left out."""
    return {rank: json_object(path / "end.json") for rank, path in ranks(run).items() if (path / "end.json").is_file()}


def notes_of(run: Path, world_size: int) -> list[str]:
    """What must be known before the numbers: ranks without a part or an end, doubts, what the recorder failed at."""
    there, over = ranks(run), ends(run)
    notes = []
    if missing := sorted(set(range(world_size)) - there.keys()):
        notes.append(f"{_ranks(missing)} recorded nothing")
    if open_ := sorted(there.keys() - over.keys()):
        notes.append(f"{_ranks(open_)} came to no orderly end (killed, or running still): shown is what was recorded")
    for rank, end in over.items():
        if failed := str(end.get("failed") or "").strip():
            notes.append(
                f"the recorder of rank {rank} stopped after {end.get('calls')} calls: {failed.splitlines()[-1]}"
            )
    doubts = dict.fromkeys(str(doubt) for end in over.values() for doubt in end.get("doubts", ()))
    return [*notes, *(f"not certain: {doubt}" for doubt in doubts)]


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {ranks_text(numbers)}"


def about(run: Path) -> dict[int, dict[str, Any]]:
    """Rank -> host, process and clock; ranks that were killed before they wrote it are left out."""
    return {
        rank: json_object(path / "rank.json") for rank, path in ranks(run).items() if (path / "rank.json").is_file()
    }
