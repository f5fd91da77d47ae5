"""Pages are read aloud without a stop: short sentences, plain words, narrow lines, and each names its purpose first.

They import `shardproof` alone, and the page of its names has them all.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

import shardproof
from shardproof.rooms import ROOMS
from tests import ROOT
from tests.project.prose import PRIVATE, blocks, sentences

LONGEST, WIDEST, WIDEST_ROW = 25, 120, 200
"""Words of a sentence; characters of a line, and of one with a link or of a row."""
AVOIDED = re.compile(
    rf"{PRIVATE.pattern}|\b(says?|said|saying|rooms?|kinks?|trials?|witness(es)?|slack|torn|islands?)\b", re.IGNORECASE
)
"""Private words of the project and generic ones for which the field has a term; code (`witnesses.csv`) is not text."""
MEASURED = re.compile(
    r"(?<![\w.#/:-])\d(?:[\d,.]*\d)? ?(?:%|(?:s|ms|GB|MB|GiB|minutes|seconds|hours|cases|calls|bugs|lines|of \d+)\b)"
)
"""A number with its unit, or a share."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"


def long_sentences(text: str) -> list[str]:
    return [sentence for sentence in sentences(text) if len(sentence.split()) > LONGEST]


def avoided_words(text: str) -> list[str]:
    return [found[0] for sentence in sentences(text) for found in AVOIDED.finditer(sentence)]


def wide_lines(text: str) -> list[str]:
    lines = text.splitlines()
    return [line for line in lines if len(line) > (WIDEST_ROW if "](" in line or line[:1] == "|" else WIDEST)]


def measured(text: str) -> set[str]:
    return {found[0] for sentence in sentences(text) for found in MEASURED.finditer(sentence)}


def unreleased() -> str:
    """The part of CHANGELOG about the release to come."""
    return (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_plain(page: Path) -> None:
    text = page.read_text()
    assert long_sentences(text) == []
    assert avoided_words(text) == []
    assert wide_lines(text) == []
    purpose = text.split("\n\n")[1]
    assert text.startswith("# ") and purpose[:1].isalpha() or page == ROOT / "README.md"
    assert len(purpose.splitlines()) <= 3, "the first lines name what the page is for"


def test_a_measured_number_is_on_one_page() -> None:
    pages = Counter(number for page in PAGES for number in measured(page.read_text()))
    assert [number for number, count in pages.items() if count > 1] == [], "one page has it, others link there"


def test_what_changed_is_plain() -> None:
    assert avoided_words(unreleased()) == []
    assert wide_lines(unreleased()) == []


def test_the_index_has_every_page_in_an_order() -> None:
    headings = re.findall(r"^## (.+)$", INDEX.read_text(), re.MULTILINE)
    assert headings == ["Start here", "How it works", "Reference"]
    linked = {(INDEX.parent / link).resolve() for link in re.findall(r"\]\(([^)#:]+)\)", INDEX.read_text())}
    assert {path for path in INDEX.parent.iterdir() if path.suffix in (".md", ".ipynb")} - {INDEX} <= linked


def test_what_is_not_plain_is_seen() -> None:
    words = "one two three four five six seven eight nine ten eleven twelve"
    long = f"{words} {words} {words}."
    assert long_sentences(f"# Title\n\n{long}") == [long]
    assert long_sentences(f"* {words}\n  {words} {words}") == [f"{words} {words} {words}"]
    assert long_sentences(f"| a | b |\n|---|---|\n| x | {long} |") == [long]
    assert not long_sentences(f"{words}. {words}: `{long}`\n\n    {long}\n\n```\n{long}\n```\n\n# {long}")
    assert not long_sentences(f"| word | legal |\n|---|---|\n| x | {long} |")
    assert avoided_words("Nobody is told so much; `told`.") == ["Nobody", "told", "so much"]
    assert measured("It takes 41 s, 2.5 % of 3 hours, 62 of 63; torch 2.11, `98 cases`.") == {
        *("41 s", "2.5 %", "3 hours", "62 of 63")
    }
    assert wide_lines("x" * 121 + "\n|" + "x" * 199 + "\n[a](b)" + "x" * 190) == ["x" * 121]
    assert wide_lines("|" + "x" * 200) == ["|" + "x" * 200]
    assert wide_lines("[a](b)" + "x" * 200) == ["[a](b)" + "x" * 200]
    assert list(blocks("# T\n\na\nb\n\n1. c\n2. d")).count("a b") == 1


ABOUT_THE_FOLDERS = {"design.md"}
FORMER = "Former paths that earlier releases documented"
"""How the one line begins that names what forwards."""
MODULE = re.compile(rf"(?<![/\w.])(?:{'|'.join(ROOMS[:4])})\.(?!py\b)\w+[\w.]*(?::\w+)?")
A_SUBJECT = {"parallel.subject:subject"}


def inner_names(text: str) -> set[str]:
    lines = [line for line in text.splitlines() if not line.startswith(FORMER)]
    return set(MODULE.findall("\n".join(lines))) - A_SUBJECT


def test_a_page_names_no_module_behind_the_public_face() -> None:
    paths = [ROOT / "README.md", *(path for path in DOCS.rglob("*") if path.suffix in (".md", ".ipynb", ".py", ".yml"))]
    for path in paths:
        assert path.name in ABOUT_THE_FOLDERS or not inner_names(path.read_text()), path
    assert inner_names("see `harness.outcome` and reports.load(run)") == {"harness.outcome", "reports.load"}
    assert not inner_names(
        "--subject parallel.subject:subject, `parallel/communication/expectation.py`, reports.py, shardproof.load"
    )


def test_the_page_of_names_has_them_all() -> None:
    rows = [line for line in (DOCS / "names.md").read_text().splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)(?:\([^`]*\))?`", row.split(" | ")[0])]
    assert sorted(named) == shardproof.__all__
