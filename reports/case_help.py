"""`shardproof help case`: the words of the case language, from what the case class itself declares."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from harness.resolve import resolve

__all__ = ["CASE", "main", "page", "text"]

CASE = "reference.case:Case"
"""The class whose `meanings()` are printed."""
_EXAMPLE = 'shardproof run "mode=tp-sp tp=4 kv_heads=4 steps=3 dtype=bfloat16"'
_LEAD = (
    "A case is one experiment: words `key=value` in any order, in quotes. A word that is left out has its default; "
    "a default marked with * is derived from other words when one of them is given. `preset` sets many words at once."
)


def main(parsed: argparse.Namespace) -> int:
    """Print the words, or with `--markdown` the page docs/case.md. Returns 0."""
    sys.stdout.write(page() if parsed.markdown else text(shutil.get_terminal_size().columns))
    return 0


def text(columns: int) -> str:
    """The words by group for a terminal of this many columns (at least 60)."""
    lines = [*textwrap.wrap(_LEAD.replace("`", ""), max(columns, 60)), "", f"example: {_EXAMPLE}"]
    for group, words in _groups():
        lines += ["", f"{group}:"]
        for word in words:
            left = f"  {word.name}={word.default}{'*' if word.follows else ''}"
            said = f"{word.meaning}; legal: {_legal(word)}"
            lines += textwrap.wrap(
                said, max(columns, 60), initial_indent=f"{left:28}", subsequent_indent=" " * 28, break_on_hyphens=False
            )
    return "\n".join(lines) + "\n"


def page() -> str:
    """The same as markdown: one table a group."""
    lines = ["# The words of a case", "", _LEAD, "", f"    {_EXAMPLE}", ""]
    lines += ["`shardproof help case` prints this page; a test holds the two equal.", ""]
    for group, words in _groups():
        lines += [f"## {group[:1].upper()}{group[1:]}", "", "| word | default | meaning | legal |", "|---|---|---|---|"]
        for word in words:
            default = f"`{word.default}`" if word.default else ""
            cells = (f"`{word.name}`", f"{default}{'*' if word.follows else ''}", word.meaning, _legal(word))
            lines.append("| " + " | ".join(cell.replace("|", ", ") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _groups() -> Iterator[tuple[str, Iterable[Any]]]:
    case: Any = resolve(CASE)
    return groupby(case.meanings(), key=lambda word: word.group)


def _legal(word: Any) -> str:
    derived = f" (* from {', '.join(word.follows)})" if word.follows else ""
    return f"{word.legal.replace('|', ', ')}{derived}"
