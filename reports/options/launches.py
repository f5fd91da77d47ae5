"""The words of `shardproof parity` and of `compare --values`, checked before torch is loaded."""

from collections.abc import Sequence
from pathlib import Path

from shardproof.harness.errors import RequestError

VALUES = "values"
"""Folder of a recording that holds values (harness.programs.values, which needs torch)."""
_LEGAL = "shardproof parity -- torchrun --nproc-per-node 1 train.py -- torchrun --nproc-per-node 2 train.py"


def commands_of(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The two commands behind `--`. Raises RequestError."""
    parts: list[list[str]] = []
    for word in words:
        if word == "--":
            parts.append([])
        elif parts:
            parts[-1].append(word)
        else:
            raise RequestError(f"parity {word}: each command stands behind a -- of its own; legal: {_LEGAL}")
    if len(parts) != 2 or not all(parts):
        rule = "takes two commands, each behind a -- of its own (one that has a -- in it: sh -c '...')"
        raise RequestError(f"parity: {rule}; legal: {_LEGAL}")
    return tuple(parts[0]), tuple(parts[1])


def count_of_steps(text: str) -> int:
    """The number of steps that are compared. Raises RequestError."""
    if not text.isdigit() or not 1 <= int(text) < 10**4:
        raise RequestError(f"steps={text}: must be the number of steps to compare, at least 1; legal: --steps 2")
    return int(text)


def folder_of_values(name: str | None) -> Path:
    """A folder with recorded values. Raises RequestError where there is none."""
    legal = "a folder of `shardproof record --values`, or a launch of `parity`, as runs/latest/first"
    if name is None:
        raise RequestError("values: two folders are compared, BASE and NEW; legal: compare BASE NEW --values")
    if not (Path(name) / VALUES).is_dir():
        raise RequestError(f"folder={name}: holds no values; legal: {legal}")
    return Path(name).resolve()  # `latest` is another run as soon as this one is stored
