"""The default run as `make run` leaves it: the table of docs/default_run.md, and a page with its figures.

Pages in a real browser, side by side in frames of three widths: no console message, no request, nothing wider than the
screen. A screenshot lands in the test's folder. Skipped where no Chromium is installed. axe-core's rules of
accessibility are put to copies of pages where `.ci/axe` has fetched them.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from html import unescape
from pathlib import Path

import pytest

from shardproof.reports.commands.cli import main
from shardproof.reports.comparing.comparison import compare
from shardproof.reports.comparing.snapshot import read_side
from shardproof.reports.pages.comparison_page import render_comparison
from shardproof.reports.stored.frames import load
from shardproof.reports.stored.summary import traffic
from tests import ROOT
from tests.project.test_documents import TABLE, table_rows
from tests.reports.pages.page_figures import compared

CASES = 239
LATEST = ROOT / "runs" / "latest"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCREENS = {390: 844, 1400: 900, 2500: 1400}
"""Widths and heights of a telephone, a laptop and a large screen."""
ALONE = ("--headless=new", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND")
AXE = ROOT / ".axe/node_modules/axe-core/axe.min.js"
AUDIT = """<script>axe.run(document, {resultTypes: ["violations"]}).then(found => {
  const told = document.createElement("pre"); told.id = "axe";
  told.textContent = JSON.stringify(found.violations.map(rule => [rule.id, rule.nodes.map(node => node.html)]));
  document.body.append(told); })</script></body>"""
SCHEMES = {"light": 1, "dark": 0}
"""Chromium's numbers for the colours that a reader prefers."""
MEASURE = (
    "<script>addEventListener('load', () => parent.postMessage("
    "[name, document.documentElement.scrollWidth - innerWidth, document.body.scrollHeight], '*'))</script></body>"
)
"""A script for the page in a frame: it tells how much wider than the frame the page is, and how tall."""
LISTEN = (
    "<script>addEventListener('message', ({data}) => { document.body.append(Object.assign("
    "document.createElement('pre'), {textContent: JSON.stringify(data)})) })</script>"
)
"""In the page around the frames, before them."""
NOISE = re.compile(r"CONSOLE|net::ERR|Failed to load")
"""Words of Chromium about a page that is not silent."""
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; apt-get install chromium")
needs_axe = pytest.mark.skipif(not AXE.is_file() or CHROMIUM is None, reason="no axe-core here; .ci/axe fetches it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder of the run, its page in it: of `make run`, unless sources are newer; `deep` makes one of its own."""
    if request.config.getoption("hypothesis_profile", None) != "deep":
        if not is_default_run(LATEST, (ROOT / name for name in ("harness", "parallel", "reference", "reports"))):
            pytest.skip("needs the default run of these sources: make run")
        return LATEST.resolve()
    out = tmp_path_factory.mktemp("default")
    assert main(["run", "--out", str(out)]) == 0
    return out / "latest"


def is_default_run(run: Path, sources: Iterable[Path]) -> bool:
    """Whether a folder holds a run of all default cases that began after the last of these sources was changed."""
    stated = run / "env.json"
    if not stated.exists() or json.loads(stated.read_text())["request"].get("cases") != CASES:
        return False
    files = (path for folder in sources for path in folder.rglob("*.*") if path.suffix != ".pyc")
    return stated.stat().st_mtime > max(path.stat().st_mtime for path in files)


def test_a_run_of_other_cases_or_of_older_sources_is_none(tmp_path: Path) -> None:
    run, source = tmp_path / "run", tmp_path / "source" / "a.py"
    for file in (run / "env.json", source):
        file.parent.mkdir()
        file.write_text(json.dumps({"request": {"cases": CASES}}))
    for source_s, cases, answer in ((1, CASES, True), (3, CASES, False), (1, 2, False)):
        (run / "env.json").write_text(json.dumps({"request": {"cases": cases}}))
        for file, time_s in ((run / "env.json", 2), (source, source_s)):
            os.utime(file, (time_s, time_s))
        assert is_default_run(run, [source.parent]) is answer
    assert not is_default_run(tmp_path / "nowhere", [])


def test_the_documented_table_is_that_of_the_run_and_no_calls_differ(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(folder)]) == 0
    rows, run = table_rows(capsys.readouterr().out), load(folder)
    assert rows == table_rows(TABLE)
    assert sum(int(row[2]) for row in rows) == len(run.cases) == CASES
    assert set(traffic(run)["agrees"]) == {"yes"}, "stages rightly differ: each has its own expectation"


def test_figures_of_the_page_are_those_of_the_summary_and_one_that_is_not_is_found(folder: Path) -> None:
    html = (folder / "report.html").read_text()
    found = compared(html, folder)
    assert found.apart == []
    assert found.figures["cases"] == 3 * CASES + 1
    assert found.figures["traffic"] > 1000 and found.figures["bars"] > 200
    sorting = re.sub(r"(<th [^>]*>)(.*?)</th>", r'\1<button type="button">\2</button></th>', html)
    assert compared(sorting, folder) == found, "headers as the page's script writes them"
    begin, end = html.index('<section id="traffic">'), html.index('<section id="modules">')
    cells = list(re.compile(r'<td data-what="calls" class="number">([\d,]*\d)(\.\d+)?</td>').finditer(html, begin, end))
    bar = re.compile(r'<rect x="[\d.]+" width="(\d+)[\d.]+" height="10"').search(
        html, html.index('<section id="cases">')
    )
    assert bar
    for place in (cells[len(cells) // 2].start(1), bar.end(1)):
        html = f"{html[:place]}7{html[place:]}"
    assert {flaw.partition(",")[0] for flaw in compared(html, folder).apart} == {"traffic", "bars"}


def browse(url: str, width: int, *words: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM
    listening = ("--enable-logging=stderr", "--v=0", f"--window-size={width},2000")
    command = [CHROMIUM, *ALONE, *listening, *words, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@needs_chromium
def test_in_a_browser_all_figures_of_the_page_are_those_of_the_summary(folder: Path) -> None:
    done = browse((folder / "report.html").resolve().as_uri(), 1400, "--dump-dom")
    assert not NOISE.search(done.stderr)
    assert compared(done.stdout, folder).apart == []


def measured(folder: Path, pages: Iterable[str]) -> tuple[dict[tuple[int, int], tuple[int, int]], str]:
    """(Number of a page, width) -> by how much it is wider than the screen, and its height; and what the browser said.

    One start of the browser shows all pages, each in a frame of every width.
    """
    frames = []
    for number, shown in enumerate(pages):
        (folder / f"{number}.html").write_text(shown.replace("</body>", MEASURE))
        frames += [
            f'<iframe name="{number} {width}" src="{number}.html" width="{width}" height="{height}" frameborder="0">'
            "</iframe>"
            for width, height in SCREENS.items()
        ]
    (folder / "frames.html").write_text(f"<html><body>{LISTEN}{''.join(frames)}</body></html>")
    done = browse((folder / "frames.html").as_uri(), 2600, "--dump-dom", f"--screenshot={folder}/frames.png")
    found = [json.loads(text) for text in re.findall(r"<pre>(.*?)</pre>", unescape(done.stdout))]
    places = ((*map(int, name.split()), wide, tall) for name, wide, tall in found)
    return {(number, width): (wide, tall) for number, width, wide, tall in places}, done.stderr


@needs_chromium
def test_the_pages_fit_are_four_screens_high_and_silent(
    html: str, runs: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    base, new = (read_side(str(runs[way])) for way in ("right", "gather"))
    pages = html, (folder / "report.html").read_text(), render_comparison(compare(base, new))
    sizes, said = measured(tmp_path, pages)
    assert {*sizes} == {(number, width) for number in range(len(pages)) for width in SCREENS}
    assert max(wide for wide, _ in sizes.values()) <= 0, "only wide tables may be wider, and they scroll"
    assert all(tall <= 4 * SCREENS[width] for (_, width), (_, tall) in sizes.items()), "folded"
    assert max(len(re.findall("<h[1-6]", shown)) for shown in pages) <= 6
    assert not NOISE.search(said)


@needs_chromium
def test_a_page_that_is_broken_wide_or_long_is_noticed(tmp_path: Path) -> None:
    broken = "<body><script>console.error('heard'); nowhere()</script><div style='width:3000px;height:9000px'>x</div>"
    sizes, said = measured(tmp_path, [f"{broken}</body>"])
    assert [wide > 0 for wide, _ in sizes.values()] == [True] * len(SCREENS)
    assert all(tall >= 9000 for _, tall in sizes.values())
    assert NOISE.search(said) and "nowhere is not defined" in said


ROW = r"<tr[^>]*>(?:(?!<tr).)*?</tr>\s*"
FIRST_ROWS = re.compile(f"((?:{ROW}){{10}})(?:{ROW})+", re.DOTALL)


def audited(page_html: str, copy: Path, scheme: str) -> list[tuple[str, list[str]]]:
    """The rules that a page breaks, and the elements that break them; of every table ten rows are looked at."""
    copy.write_text(FIRST_ROWS.sub(r"\1", page_html).replace("</body>", f"<script>{AXE.read_text()}</script>{AUDIT}"))
    asked = ("--dump-dom", "--virtual-time-budget=20000", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}")
    told = re.search(r'<pre id="axe">(.*?)</pre>', browse(copy.as_uri(), 820, *asked).stdout, re.DOTALL)
    assert told, "axe-core did not finish"
    return [(rule, elements) for rule, elements in json.loads(unescape(told[1]))]


@needs_axe
@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing_to_mend(html: str, folder: Path, tmp_path: Path, scheme: str) -> None:
    for page in (html, (folder / "report.html").read_text()):
        assert audited(page, tmp_path / "axe.html", scheme) == []


@needs_axe
def test_axe_finds_what_is_planted(tmp_path: Path) -> None:
    main = "<main><h1>x</h1><img src='data:,'><p style='color:#ccc'>pale</p></main>"
    broken = f"<html><title>x</title><body>{main}</body>"
    rules = {rule for rule, _ in audited(broken, tmp_path / "axe.html", "light")}
    assert {"html-has-lang", "image-alt", "color-contrast"} <= rules
