"""What CI adds: badges of the README, and tests that are skipped everywhere.

Badges state the tables of docs/evidence.md and docs/default_run.md, and releases that `make compat` and docs/limits.md
name. A test that is skipped in the reports of both environments is named, unless no environment of CI can run it.
"""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import badges, skips
from bench.skips import NOWHERE
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


PAGE = badges.read_pages()


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
    failed = re.sub(r"^(isp .*)pass$", r"\1fail", PAGE, count=1, flags=re.MULTILINE)
    assert values(failed)[1] == "modes proved: 6 of 7"


TESTS = """
import importlib.util
import pytest

full = pytest.mark.skipif(importlib.util.find_spec("extra") is None, reason="needs extra")


@full
def test_with_the_extra(): ...


@pytest.mark.skipif(importlib.util.find_spec("extra") is not None, reason="extra is there")
def test_without_the_extra(): ...


class TestBoth:
    @pytest.mark.parametrize("number", [1, pytest.param(2, marks=full), pytest.param(3, marks=pytest.mark.skip("no"))])
    def test_numbers(self, number): ...


@pytest.mark.skip("a minute: --hypothesis-profile deep")
def test_deep(): ...


@pytest.mark.xfail
def test_known(): assert False
"""
OF_A_MODULE = "import pytest\npytest.importorskip({!r}, reason='needs it')\ndef test_any(): ..."


def run_tests(folder: Path, report: Path) -> str:
    """Run the tests of a folder with the modules beside `report`, and write the report. Returns its path."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(folder), str(folder)]
    command += ["-p", "no:shardproof", "-p", "no:cacheprovider", "-o", f"pythonpath={report.parent}"]
    subprocess.run([*command, f"--junitxml={report}"], check=True, capture_output=True, timeout=60)
    return str(report)


def test_a_test_that_every_run_skips_is_named_with_its_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests, bare, full = (tmp_path / name for name in ("tests", "bare", "full"))
    for folder in (tests, bare, full):
        folder.mkdir()
    (full / "extra.py").touch()
    (tests / "test_parts.py").write_text(TESTS)
    for name in ("extra", "nowhere"):
        (tests / f"test_of_{name}.py").write_text(OF_A_MODULE.format(name))
    without, within = run_tests(tests, bare / "tests.xml"), run_tests(tests, full / "tests.xml")
    assert skips.main([without, within]) == 1
    module, never = capsys.readouterr().err.splitlines()
    assert module.startswith("test_of_nowhere: is skipped in every run (") and "'Skipped: needs it'" in module
    assert never == "test_parts.TestBoth::test_numbers[3]: is skipped in every run (no)"


def test_a_test_that_only_one_run_has_is_skipped_there_or_not() -> None:
    one, other = "tests.test_a::test_one[a]", "tests.test_a::test_one[b]"
    assert skips.skipped_everywhere([{one: "no x"}, {other: ""}]) == {one: ["no x"]}
    assert skips.skipped_everywhere([{one: ""}, {other: ""}]) == {}
    assert skips.skipped_everywhere([{one: "no x"}, {one: "no y", other: ""}]) == {one: ["no x", "no y"]}
    assert skips.skipped_everywhere([{one: f"x {reason}"} for reason in NOWHERE]) == {}


def test_a_report_of_nothing_is_no_report(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text("<testsuites><testsuite></testsuite></testsuites>")
    with pytest.raises(SystemExit, match="names no test"):
        skips.main([str(tmp_path / "tests.xml")])


def test_only_tests_that_a_run_has_not_skipped_count_as_run(tmp_path: Path) -> None:
    tests, bare = tmp_path / "tests", tmp_path / "bare"
    for folder in (tests, bare):
        folder.mkdir()
    (tests / "test_parts.py").write_text(TESTS)
    (tests / "test_of_extra.py").write_text(OF_A_MODULE.format("extra"))
    done = skips.report(Path(run_tests(tests, bare / "tests.xml")))
    left = {
        one: skips.has_run(f"test_{one}", done)
        for one in (
            *("of_extra.py::test_any", "parts.py::test_with_the_extra", "parts.py::test_without_the_extra"),
            *("parts.py::TestBoth::test_numbers[1]", "parts.py::TestBoth::test_numbers[2]", "parts.py::test_new"),
        )
    }
    assert [one for one, ran_there in left.items() if ran_there] == [
        "parts.py::test_without_the_extra",
        "parts.py::TestBoth::test_numbers[1]",
    ]
