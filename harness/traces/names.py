"""Names of the files of traces: which a folder holds, and where the rank stands in one. Nothing here loads torch."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardproof.harness.errors import RequestError

RANK = r"rank[-_.]?(\d+)"
"""Where the rank stands in the name of a file, unless the user says otherwise."""
REPORTS = (".nsys-rep", ".qdstrm")
SUFFIXES = (".json", ".json.gz", ".pickle", ".pkl", ".sqlite", *REPORTS)
"""Ends of the names of traces, by which they are found in a folder."""
_DUMP = re.compile(r"[^.]*rank_?\d+")
"""The name that the Flight Recorder gives its files, which has no suffix."""
LEGAL = "a trace of torch.profiler, a dump of NCCL's Flight Recorder, or a report of nsys"


def check_names(names: Iterable[str], rank_regex: str = RANK) -> None:
    """Raise RequestError for what is no file or folder of traces, or no pattern, before anything is read."""
    rank_pattern(rank_regex)
    for name in names:
        list(trace_files(Path(name)))


def rank_pattern(text: str) -> re.Pattern[str]:
    """The pattern of an option, whose group 1 is the rank. Raises RequestError where it is none."""
    try:
        pattern = re.compile(text)
    except re.error as problem:
        raise RequestError(f"rank-regex={text}: is no regular expression ({problem}); legal: {RANK}") from problem
    if pattern.groups < 1:
        raise RequestError(f"rank-regex={text}: has no group for the rank; legal: {RANK}")
    return pattern


def trace_files(path: Path) -> Iterator[Path]:
    """The file, or those in a folder that are named as traces are. Raises RequestError where there is none."""
    if path.is_dir():
        named = (one for one in path.iterdir() if one.name.endswith(SUFFIXES) or _DUMP.fullmatch(one.name))
        files = sorted(file for file in named if file.is_file())
        if not files:
            raise RequestError(f"trace {path}: the folder holds no {', '.join(SUFFIXES)}; legal: {LEGAL}")
        yield from files
    elif path.is_file():
        yield path
    else:
        raise RequestError(f"trace {path}: no such file or folder; legal: {LEGAL}")
