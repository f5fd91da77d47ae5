"""Documentation and examples import `shardproof` alone, and the page of its names has them all."""

import re
from pathlib import Path

import pytest

import shardproof
from shardproof.rooms import ROOMS
from tests import ROOT

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in DOCS.rglob("*") if path.suffix in (".md", ".ipynb", ".py", ".yml")),
]
ABOUT_THE_FOLDERS = {"design.md"}
FORMER = "Former paths that earlier releases documented"
"""How the one line begins that names what forwards."""
MODULE = re.compile(rf"(?<![/\w.])(?:{'|'.join(ROOMS[:4])})\.(?!py\b)\w+[\w.]*(?::\w+)?")
A_SUBJECT = {"parallel.subject:subject"}


def inner_names(text: str) -> set[str]:
    lines = [line for line in text.splitlines() if not line.startswith(FORMER)]
    return set(MODULE.findall("\n".join(lines))) - A_SUBJECT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_no_module_behind_the_public_face(page: Path) -> None:
    if page.name not in ABOUT_THE_FOLDERS:
        assert not inner_names(page.read_text())


def test_a_module_behind_it_would_be_seen() -> None:
    assert inner_names("see `harness.outcome` and reports.load(run)") == {"harness.outcome", "reports.load"}
    assert not inner_names(
        "--subject parallel.subject:subject, `parallel/communication/expectation.py`, reports.py, shardproof.load"
    )


def test_the_page_of_names_has_them_all() -> None:
    rows = [line for line in (DOCS / "names.md").read_text().splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)(?:\([^`]*\))?`", row.split(" | ")[0])]
    assert sorted(named) == shardproof.__all__
