"""The README's first screen has what a reader needs, and links lead somewhere. Its table: test_default_run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LONGEST = 120
"""Lines of the README: what needs more room is a page in docs/."""
FIRST_SCREEN = (ROOT / "README.md").read_text().splitlines()[:52]
ERROR = slice(11, 14)
"""Where a row's words hold its error: rounding, which may differ between machines."""


def table_rows(text: str) -> list[list[str]]:
    """The words of every row of the headline table, its error left out."""
    rows = [line.split() for line in text.splitlines() if line.endswith(" pass") and " / " in line]
    return [[*row[: ERROR.start], *row[ERROR.stop :]] for row in rows]


def test_the_first_screen_has_the_sentence_the_table_the_commands_and_the_subject() -> None:
    text = "\n".join(FIRST_SCREEN)
    for needed in ("make run", "make test", "Point it at your own code", "def subject(case, device)", "--subject"):
        assert needed in text
    assert len(table_rows(text)) == 21


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
    if page.name == "README.md":
        linked = {(page.parent / link).resolve() for link in links}
        assert {one for one in PAGES if one.parent.name == "docs"} <= linked, "every page is reached from here"
