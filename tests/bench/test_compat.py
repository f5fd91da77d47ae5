"""`make compat`: interpreters are found or named as missing, and a failed step is reported. Badges state its table."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import badges, compat
from bench.compat import FAILED, MATRIX, NOT_RUN, PASSED, proved
from bench.environments import ended, install
from shardproof.harness.torch_internals.lookup import TESTED
from tests import ROOT


def test_the_matrix_is_what_is_said_to_be_tested() -> None:
    releases = {tuple(map(int, torch.split(".")[:2])) for _, torch in MATRIX}
    assert (min(releases), max(releases)) == TESTED
    assert {python for python, _ in MATRIX} == {"3.11", "3.12", "3.13"}
    project = (ROOT / "pyproject.toml").read_text()
    assert '"torch>=2.11"' in project and all(f"Python :: {python}" in project for python, _ in MATRIX)
    text = (ROOT / "docs" / "limits.md").read_text()
    assert all(torch in text for _, torch in MATRIX) and "`make compat`" in text


@pytest.mark.parametrize(
    ("results", "status"), [((PASSED, PASSED), 0), ((PASSED, FAILED), 1), ((NOT_RUN,), 1), ((NOT_RUN, PASSED), 0)]
)
def test_a_failed_step_or_nothing_run_is_status_1_and_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], results: tuple[str, ...], status: int
) -> None:
    rows = [("run", result, 41.6, "" if result == PASSED else "it died") for result in results]
    monkeypatch.setattr(compat, "proved", lambda *_, **__: rows)
    assert compat.main(["--only", "3.12:2.14"]) == status
    rest = {PASSED: "42 s", FAILED: "42 s: it died", NOT_RUN: "42 s: it died"}
    told = capsys.readouterr().out.splitlines()
    assert told == [f"3.12 torch 2.14.1 run: {result} {rest[result]}" for result in results]
    assert compat.main(["--only", "2.7"]) == 2
    assert "legal: 3.12:2.11.0" in capsys.readouterr().err


def test_an_interpreter_that_is_not_here_and_a_step_that_fails_or_does_not_end_say_so() -> None:
    (told,) = proved("3.99", "2.14.1", keep=False)
    assert told == ("all", NOT_RUN, 0.0, "no python3.99 on PATH")
    python = [sys.executable, "-c"]
    assert ended([*python, "print(1)"]) == ""
    assert ended([*python, "print('lost'); raise SystemExit(5)"]) == "exit status 5: lost"
    assert ended(["sleep", "60"], 0.1).startswith("no end within 0 s")


def test_an_environment_has_what_is_named_and_all_else_as_it_is_pinned(tmp_path: Path) -> None:
    venv, packages, checkout = install("python3.99", tmp_path / "place", ["torch==2.14.1", "megatron-core"])
    assert venv == ["python3.99", "-m", "venv", "--clear", str(tmp_path / "place")]
    assert "torch==2.14.1" in packages and not any(package.startswith("torch>") for package in packages)
    pins = (tmp_path / "place.txt").read_text()
    assert packages[packages.index("--constraint") + 1] == str(tmp_path / "place.txt")
    assert "torch==" not in pins and "numpy==" in pins and "megatron-core==" in pins
    assert checkout[-2:] == ["--editable", str(ROOT)]


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
