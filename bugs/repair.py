"""Writes down where moved or renamed functions are now, in every file of bugs.

    python -m shardproof.bugs.repair [--dry-run]

A function is the one in its package that holds the old lines of a bug. Exit status: 0 every bug has its place, 1 some
have none; each of these is named, and its lines must be written anew.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from shardproof.bugs.anchors import AnchorLost, apply_change, find_change, source_of
from shardproof.bugs.record import FOLDER, Bug, read_bugs

_HELD_BACK = "a bug that is held back"
"""Name that replaces the name and lines of such a bug in messages."""


def find_moved_places(bug: Bug) -> dict[str, str]:
    """Stated place -> place of today, for the changes that are elsewhere. Raises AnchorLost, which names the bug."""
    places: dict[str, str] = {}
    texts: dict[str, str] = {}
    for change in bug.changes:
        try:
            now = find_change(change, texts)
        except AnchorLost:
            try:
                now = find_change(change, texts, renamed=True)
            except AnchorLost as lost:
                raise AnchorLost(f"{bug.name}: {lost}") from None
        texts[now.module] = apply_change(texts.get(now.module) or source_of(now.module), now)
        if str(now) != str(change):
            places[str(change)] = str(now)
    return places


def main(arguments: Sequence[str], folder: Path = FOLDER) -> int:
    """Rewrite the files of a folder; with --dry-run only report."""
    lost = 0
    for path in sorted(folder.rglob("*.txt")):
        places: dict[str, dict[str, str]] = {}
        kept = "held_back" in path.parts
        for bug in read_bugs(path, Bug, {}):
            try:
                places[bug.name] = find_moved_places(bug)
            except AnchorLost as problem:
                lost += 1
                print(f"{path.name}: {_HELD_BACK if kept else problem}", file=sys.stderr)
        if any(places.values()) and "--dry-run" not in arguments:
            path.write_text(_rewrite_places(path.read_text(encoding="utf-8"), places), encoding="utf-8")
        for name, of_bug in places.items():
            for old, new in of_bug.items():
                print(f"{path.name}: {_HELD_BACK if kept else name}: {old} is now {new}")
    return int(lost > 0)


def _rewrite_places(text: str, places: dict[str, dict[str, str]]) -> str:
    lines, name = [], ""
    for line in text.splitlines():
        if line and not line.startswith((" ", "#")):
            name = line.partition(": ")[0]
        here = line.removeprefix("  at ")
        lines.append(f"  at {places.get(name, {}).get(here, here)}" if here != line else line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
