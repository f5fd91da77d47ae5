"""Annotations of GitHub Actions: a failure at its line of source, on the page of the change that is reviewed.

A workflow command is a line on stderr, `::error file=...,line=...,title=...::message`, printed where the variable
GITHUB_ACTIONS is set. GitHub shows ten of a step; further failures stand in the log.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

from shardproof.reports.printing.printable import printable

_MOST = 10
Failure = tuple[str, str, str]
"""Where it is, "file:line" or "", its title, and its message."""


def annotate_failures(failures: Iterable[Failure], stream: TextIO, environment: Mapping[str, str]) -> None:
    """Print an annotation for each failure, where this is a job of GitHub Actions."""
    if environment.get("GITHUB_ACTIONS") != "true":
        return
    root = Path(environment.get("GITHUB_WORKSPACE") or ".").resolve()
    for _, (place, title, message) in zip(range(_MOST), failures, strict=False):
        words = [*_place_words(place, root), f"title={_escape_property(title)}"]
        stream.write(f"::error {','.join(words)}::{_escape(printable(message))}\n")
    stream.flush()


def _place_words(place: str, root: Path) -> list[str]:
    """File and line, where the file is one of the repository: GitHub knows no other."""
    file, _, line = place.rpartition(":")
    path = (root / file).resolve()
    if not (file and line.isdigit() and path.is_file() and path.is_relative_to(root)):
        return []
    return [f"file={_escape_property(path.relative_to(root).as_posix())}", f"line={line}"]


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
