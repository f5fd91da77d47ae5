"""The README's first screen has what a reader needs; that its table is what a run prints: test_default_run."""

from __future__ import annotations

from pathlib import Path

FIRST_SCREEN = (Path(__file__).resolve().parents[2] / "README.md").read_text().splitlines()[:40]
ERROR = slice(8, 11)
"""Where a row's words hold its error: rounding, which may differ between machines."""


def table_rows(text: str) -> list[list[str]]:
    """The words of every row of the headline table, its error left out."""
    rows = [line.split() for line in text.splitlines() if " pass " in line and " / " in line]
    return [[*row[: ERROR.start], *row[ERROR.stop :]] for row in rows]


def test_the_first_screen_has_the_sentence_the_table_the_commands_and_the_subject() -> None:
    text = "\n".join(FIRST_SCREEN)
    for needed in ("make run", "make test", "Point it at your own code", "def subject(case, device)", "--subject"):
        assert needed in text
    assert len(table_rows(text)) == 7
