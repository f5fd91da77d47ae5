"""Badges state what the tables of docs/checks.md and `make compat` state, and a stale one is named."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import badges
from tests import ROOT

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


def test_a_stale_badge_is_named_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"ROOT": tmp_path, "FOLDER": tmp_path / "badges"}.items():
        monkeypatch.setattr(badges, name, value)
    assert badges.main(["--check"]) == 1 and not (tmp_path / "badges").exists()
    assert "badges/bugs.svg: is stale; python -m bench.badges writes it" in capsys.readouterr().err
    assert badges.main([]) == 0 and badges.main(["--check"]) == 0
    (tmp_path / "badges" / "torch.svg").write_text("torch 1.0")
    assert badges.main(["--check"]) == 1
    assert capsys.readouterr().err == "badges/torch.svg: is stale; python -m bench.badges writes it\n"
