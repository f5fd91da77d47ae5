"""`shardproof run` without arguments, as users see it: the table of docs/checks.md, and a page with its figures.

All of these tests share a run. Tests that need a browser are skipped where no Chromium is installed.
"""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from reports.commands.cli import main
from reports.stored.frames import load
from reports.stored.summary import traffic
from tests.project.test_readme import TABLE, table_rows
from tests.reports.pages.page_figures import compared
from tests.reports.pages.test_page_in_a_browser import CHROMIUM, NOISE, SCHEMES, audited, browse, needs_axe

pytestmark = pytest.mark.slow
CASES = 102


@pytest.fixture(scope="module")
def printed() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, printed: io.StringIO) -> Path:
    """The folder of the run, its page in it."""
    out = tmp_path_factory.mktemp("default")
    with redirect_stdout(printed):
        assert main(["run", "--out", str(out)]) == 0
    return out / "latest"


def test_the_documented_table_is_what_a_run_prints_and_no_calls_differ(folder: Path, printed: io.StringIO) -> None:
    rows, run = table_rows(printed.getvalue()), load(folder)
    assert rows == table_rows(TABLE)
    assert sum(int(row[2]) for row in rows) == len(run.cases) == CASES
    assert set(traffic(run)["agrees"]) == {"yes"}, "stages rightly differ: each has its own expectation"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; apt-get install chromium")
def test_in_a_browser_all_figures_of_the_page_are_those_of_the_summary(folder: Path) -> None:
    done = browse((folder / "report.html").resolve().as_uri(), 1400, "--dump-dom")
    assert not NOISE.search(done.stderr)
    assert compared(done.stdout, folder).apart == []


@needs_axe
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; apt-get install chromium")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing_to_mend(folder: Path, tmp_path: Path, scheme: str) -> None:
    assert audited((folder / "report.html").read_text(), tmp_path / "axe.html", scheme) == []


def test_figures_of_the_page_are_those_of_the_summary_and_one_that_is_not_is_found(folder: Path) -> None:
    html = (folder / "report.html").read_text()
    found = compared(html, folder)
    assert found.apart == []
    assert found.figures["cases"] == 3 * CASES + 1
    assert found.figures["traffic"] > 1000 and found.figures["bars"] > 200
    begin, end = html.index('<section id="traffic">'), html.index('<section id="modules">')
    cells = list(re.compile(r'<td class="number">([\d,]*\d)(\.\d+)?</td>').finditer(html, begin, end))
    bar = re.search(r'<rect x="[\d.]+" width="(\d+)[\d.]+" height="10"', html)
    assert bar
    for place in (cells[len(cells) // 2].start(1), bar.end(1)):
        html = f"{html[:place]}7{html[place:]}"
    assert {flaw.partition(",")[0] for flaw in compared(html, folder).apart} == {"traffic", "bars"}
