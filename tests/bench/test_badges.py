"""Badges of the README state the tables of docs/checks.md, and releases that `make compat` and docs/limits.md name."""

import re
from xml.etree import ElementTree

from bench import badges
from shardproof.harness.torch_internals.lookup import TESTED
from tests import ROOT


def test_the_releases_of_torch_are_what_is_said_to_be_tested() -> None:
    (line,) = re.findall(r"^COMPAT \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    pairs = [pair.split(":") for pair in line.split()]
    releases = {tuple(map(int, torch.split(".")[:2])) for _, torch in pairs}
    assert (min(releases), max(releases)) == TESTED
    project, limits = ((ROOT / name).read_text() for name in ("pyproject.toml", "docs/limits.md"))
    assert '"torch>=2.11"' in project and all(f"Python :: {python}" in project for python, _ in pairs)
    rows = re.findall(r"^\| (3\.\d+) \| ([\d., ]+) \|", limits, re.MULTILINE)
    assert sorted([python, torch] for python, many in rows for torch in many.split(", ")) == sorted(pairs)


PAGE = badges.PAGE.read_text()


def test_no_badge_is_stale_and_the_readme_shows_all() -> None:
    assert badges.main(["--check"]) == 0
    shown = set(re.findall(r"\]\((docs/badges/\w+\.svg)\)", (ROOT / "README.md").read_text()))
    assert shown == {path.relative_to(ROOT).as_posix() for path in badges.badges(PAGE)}


def values(page: str) -> list[str]:
    """The title of every badge, which names no host."""
    titles = []
    for text in badges.badges(page).values():
        assert "//" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        titles.append(ElementTree.fromstring(text)[0].text or "")
    return titles


def test_a_badge_follows_from_its_table() -> None:
    bugs, modes, torch = values(PAGE)
    assert modes == "modes proved: 7 of 7" and torch == "torch: 2.11 to 2.15"
    (killed,) = re.findall(r"^\| killed, of those .*$", PAGE, re.MULTILINE)
    assert values(PAGE.replace(killed, "| killed, of those | 30 of 40 | 2 of 3 |"))[0] == "planted bugs found: 32 of 43"
    assert bugs.startswith("planted bugs found: ")
    failed = re.sub(r"^(    isp .*)pass$", r"\1fail", PAGE, count=1, flags=re.MULTILINE)
    assert values(failed)[1] == "modes proved: 6 of 7"
