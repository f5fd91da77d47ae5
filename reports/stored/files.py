"""Reads the files of a run folder or a baseline: what a killed writer left is repaired, anything else is one error.

A last line without its end is dropped with a note; a broken file raises RunFolderError with one message that names it.
Each rank of a recorded program wrote a part, `ranks/<rank>/` (harness.programs.part). A line that is cut in its middle
is left out and counted; a rank without an orderly end is named once.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from shardproof.harness.errors import RequestError, guard_file, name_ranks
from shardproof.harness.run_folder import LAYOUT

_ENVIRONMENT = "env.json"
_LEGAL = "a folder that `shardproof run` wrote, such as runs/latest"
MATRIX = "kill_matrix.csv"
"""File that `shardproof faults` writes into its folder."""


class RunFolderError(RequestError):
    """A folder that is no run folder, or a file in it that no run wrote. The message names the file."""


def shorten_path(name: str | Path) -> str:
    """A path as a message names it; only the beginning of a very long one."""
    text = str(name)
    return text if len(text) <= 200 else f"{text[:80]}... ({len(text):,} characters)"


def guard_looking(name: str | Path) -> AbstractContextManager[None]:
    """Check whether something is there. Raises RunFolderError if the system does not allow that."""
    return guard_file(f"run {shorten_path(name)}", _LEGAL, failed="cannot be looked at", kind=RunFolderError)


def refuse_file(path: Path) -> None:
    """Raise RunFolderError for a file in place of a run folder. The message names the run folder that it lies in."""
    if not path.is_file():
        return
    folder = path.parent if any((path.parent / file).is_file() for file in (_ENVIRONMENT, "cases.jsonl")) else ""
    legal = f"its folder, {folder}" if folder else _LEGAL
    raise RunFolderError(f"run {shorten_path(path)}: is a file, and a run is a folder; legal: {legal}")


def run_folder(name: str | Path, *, matrix: bool = True) -> Path:
    """The path of a run folder. Raises RunFolderError if there is none, and without `matrix` for a folder with a kill
    matrix instead of cases.
    """
    path = Path(name)
    with guard_looking(path):
        there, known = path.is_dir(), any((path / file).is_file() for file in (_ENVIRONMENT, "cases.jsonl"))
        refuse_file(path)
    if not there:
        raise RunFolderError(f"run {shorten_path(path)}: no such folder; legal: {_LEGAL}")
    if not known and (path / "ranks").is_dir():
        why = "nothing was recorded: no process of the program has initialised torch.distributed"
        values = (path / "values").is_dir()
        legal = "`shardproof compare A B --values`, for the values that it holds" if values else "a program that does"
        raise RunFolderError(f"run {shorten_path(path)}: {why}; legal: {legal}")
    if not known:
        raise RunFolderError(
            f"run {shorten_path(path)}: neither env.json nor cases.jsonl in it, so it is no run folder"
        )
    if not matrix and is_matrix(path):
        what = "holds what `shardproof faults` found, bugs planted and the checks that noticed, and no run of cases"
        raise RunFolderError(f"run {shorten_path(path)}: {what}; legal: shardproof show {shorten_path(path)}")
    environment_of(path, [])
    return path


def is_matrix(folder: Path) -> bool:
    """Whether `shardproof faults` wrote this folder, which has no cases."""
    return (folder / MATRIX).is_file() and not (folder / "cases.jsonl").is_file()


def environment_of(run: Path, notes: list[str]) -> dict[str, Any]:
    """The object of env.json, empty if there is none. Raises RunFolderError for a file with other content."""
    path = run / _ENVIRONMENT
    if not path.is_file():
        notes.append("env.json is missing: versions and machine are unknown")
        return {}
    env = json_object(path)
    if (layout := env.get("layout")) != LAYOUT:
        known = f"was written in layout {layout}" if layout else "has no number of a layout"
        raise RunFolderError(f"{path}: {known}, and this release reads layout {LAYOUT}; legal: run its command again")
    return env


def json_object(path: Path) -> dict[str, Any]:
    """The one JSON object that a file holds. Raises RunFolderError when it holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise RunFolderError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{path}: must hold one JSON object, not {type(content).__name__}")
    return content


def json_lines(path: Path, needed: Sequence[str], notes: list[str]) -> list[dict[str, Any]]:
    """The objects of a file, one in each line, with the needed keys; a missing file is a note.
    Raises RunFolderError.
    """
    if not path.is_file():
        notes.append(f"{path.name} is missing: the run was stopped before it was written")
        return []
    rows = []
    for number, line in enumerate(whole_lines(path, notes).decode("utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            missing = [key for key in needed if key not in row]
        except (ValueError, TypeError, RecursionError) as error:
            raise RunFolderError(f"{path}, line {number}: not a JSON object ({error})") from error
        if missing or not isinstance(row, dict):
            raise RunFolderError(f"{path}, line {number}: needs an object with {', '.join(needed)}")
        rows.append(row)
    return rows


def whole_lines(path: Path, notes: list[str]) -> bytes:
    """The file up to its last line end. A line that a killed writer left unfinished is dropped, with a note.

    Raises RunFolderError for a file that cannot be read.
    """
    try:
        data = _unzip_readable(path, notes) if path.suffix == ".gz" else path.read_bytes()
        end = data.rfind(b"\n") + 1
        if not data[:end].isascii():
            data[:end].decode("utf-8")
    except (OSError, zlib.error, UnicodeDecodeError) as error:
        raise RunFolderError(f"{path}: cannot be read ({error})") from error
    if end < len(data):
        notes.append(f"{path.name}: its last line was cut and is left out: the run was stopped while writing it")
    return data[:end]


def _unzip_readable(path: Path, notes: list[str]) -> bytes:
    """All that can be decompressed; of an archive that was cut, what came before the cut."""
    packed, data = path.read_bytes(), bytearray()
    while packed:
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # a gzip file may hold several members
        data += member.decompress(packed)
        if not member.eof:
            notes.append(f"{path.name}: the archive is cut: the run was stopped while packing it")
        packed = member.unused_data
    return bytes(data)


STEP_TYPES = {"step": "int64", "start_us": "float64", "updated_us": "Float64", "microbatches": "Int64"}
DEVICE_TYPES = {"step": "int64"} | dict.fromkeys(
    ("device_us", "compute_us", "communication_us", "exposed_us"), "float64"
)
GROUP_TYPES = {"axis": "str", "ranks": "str"}


def is_recording(run: Path) -> bool:
    """Whether this is the run folder of a recorded program."""
    return (run / "ranks").is_dir()


def part_folders(run: Path) -> dict[int, Path]:
    """Rank -> the folder of its part, in order of ranks."""
    found = {int(path.name): path for path in (run / "ranks").iterdir() if path.name.isdecimal()}
    return {rank: found[rank] for rank in sorted(found)}


def ends_of(run: Path) -> dict[int, dict[str, Any]]:
    """Rank -> what it wrote at its orderly end, without ranks that have none."""
    return _by_rank(run, "end.json")


def about_ranks(run: Path) -> dict[int, dict[str, Any]]:
    """Rank -> host, process and clock, without ranks that were killed before they wrote it."""
    return _by_rank(run, "rank.json")


def _by_rank(run: Path, name: str) -> dict[int, dict[str, Any]]:
    files = {rank: path / name for rank, path in part_folders(run).items()}
    return {rank: json_object(file) for rank, file in files.items() if file.is_file()}


def note_unfinished_ranks(run: Path, world_size: int) -> list[str]:
    """Notes before the numbers: ranks without a part or an end, and errors of the recorder."""
    there, over = part_folders(run), ends_of(run)
    notes = []
    if missing := sorted(set(range(world_size)) - there.keys()):
        notes.append(f"{name_ranks(missing)} recorded nothing")
    if open_ := sorted(there.keys() - over.keys()):
        notes.append(
            f"{name_ranks(open_)} came to no orderly end (killed, or running still): shown is what was recorded"
        )
    for rank, end in over.items():
        if failed := str(end.get("failed") or "").strip():
            notes.append(
                f"the recorder of rank {rank} stopped after {end.get('calls')} calls: {failed.splitlines()[-1]}"
            )
    return notes


def unknown_of(env: Mapping[str, Any]) -> list[str]:
    """Sentences on what the traces of a run folder lack; none for another run."""
    unknown = env.get("unknown")
    return [str(one) for one in unknown.get("sentences") or ()] if isinstance(unknown, dict) else []


def doubts_of(run: Path) -> list[str]:
    """Notes on what the recorder was uncertain of."""
    every = [end.get("doubts") for end in ends_of(run).values()]
    doubts = dict.fromkeys(str(doubt) for own in every if isinstance(own, list) for doubt in own)
    return [f"not certain: {doubt}" for doubt in doubts]
