"""Text that is safe for a terminal, and annotations of GitHub Actions: a failure at its line of source.

Names and messages may come from files of others, whose control characters would steer a terminal. A workflow command is
a line on stderr, `::error file=...,line=...,title=...::message`, printed if the variable GITHUB_ACTIONS is set. GitHub
shows ten of a step, on the page of the reviewed change; further failures are in the log.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (but tab and line end), characters that turn the direction of text, halves of surrogate pairs."""


def printable(text: str) -> str:
    """The text with control characters as Python writes them, but with its lines and tabs."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def in_one_line(text: str) -> str:
    """The text of a cell or a line, with ends of lines and tabs as Python writes them too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


_MOST = 10
Failure = tuple[str, str, str]
"""The place of a failure ("file:line" or ""), its title, and its message."""


def annotate_failures(failures: Iterable[Failure], stream: TextIO, environment: Mapping[str, str]) -> None:
    """Print an annotation for each failure in a job of GitHub Actions."""
    if environment.get("GITHUB_ACTIONS") != "true":
        return
    root = Path(environment.get("GITHUB_WORKSPACE") or ".").resolve()
    for _, (place, title, message) in zip(range(_MOST), failures, strict=False):
        words = [*_place_words(place, root), f"title={_escape_property(title)}"]
        stream.write(f"::error {','.join(words)}::{_escape(printable(message))}\n")
    stream.flush()


def _place_words(place: str, root: Path) -> list[str]:
    """File and line, if the file is in the repository: GitHub knows no other."""
    file, _, line = place.rpartition(":")
    path = (root / file).resolve()
    if not (file and line.isdecimal() and path.is_file() and path.is_relative_to(root)):
        return []
    return [f"file={_escape_property(path.relative_to(root).as_posix())}", f"line={line}"]


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
