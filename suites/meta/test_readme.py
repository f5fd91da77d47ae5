"""The README tells what this code does: its table is what a run prints now, its first screen what a reader needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.cli import main

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
FIRST_SCREEN = README.splitlines()[:40]
ERROR = slice(8, 11)
"""Where a row's words hold its error: rounding, which may differ between machines."""


def _rows(text: str) -> list[list[str]]:
    """The words of every row of the headline table, its error left out."""
    rows = [line.split() for line in text.splitlines() if " pass " in line and " / " in line]
    return [[*row[: ERROR.start], *row[ERROR.stop :]] for row in rows]


def test_the_first_screen_has_the_sentence_the_table_the_commands_and_the_subject() -> None:
    text = "\n".join(FIRST_SCREEN)
    for needed in ("make run", "make test", "Point it at your own code", "def subject(case, device)", "--subject"):
        assert needed in text
    assert len(_rows(text)) == 7


@pytest.mark.slow
def test_the_table_is_what_a_run_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "--out", str(tmp_path)]) == 0
    printed = _rows(capsys.readouterr().out)
    assert len(printed) == 20
    assert [row for row in _rows("\n".join(FIRST_SCREEN)) if row not in printed] == []
