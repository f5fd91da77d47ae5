"""The page in a real browser: no console message, no request, nothing wider than the screen, at three widths.

Screenshots land in the test's folder. Skipped where no Chromium is installed. axe-core's rules of accessibility are put
to a copy of the page where `.ci/axe` has fetched them. The page of the default run, and all its figures:
test_default_run.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from reports.pages import page
from reports.stored.frames import load
from tests import ROOT
from tests.reports import sample_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (390, 1400, 2500)
ALONE = ("--headless=new", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND")
AXE = ROOT / ".axe/node_modules/axe-core/axe.min.js"
AUDIT = """<script>axe.run(document, {resultTypes: ["violations"]}).then(found => {
  const told = document.createElement("pre"); told.id = "axe";
  told.textContent = JSON.stringify(found.violations.map(rule => [rule.id, rule.nodes.map(node => node.html)]));
  document.body.append(told); })</script></body>"""
SCHEMES = {"light": 1, "dark": 0}
"""Chromium's numbers for the colours that a reader prefers."""
MEASURE = "<script>document.body.dataset.wide = document.documentElement.scrollWidth - innerWidth</script></body>"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; apt-get install chromium")


def browse(url: str, width: int, *words: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM
    listening = ("--enable-logging=stderr", "--v=0", f"--window-size={width},2000")
    return subprocess.run(
        [CHROMIUM, *ALONE, *listening, *words, url], capture_output=True, text=True, timeout=120, check=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = sample_run.write(tmp_path_factory.mktemp("browser") / "run", failing=True)
    page.write(load(folder), folder / "report.html")
    return folder


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_and_is_silent(folder: Path, width: int) -> None:
    copy = folder / f"measured-{width}.html"
    copy.write_text((folder / "report.html").read_text().replace("</body>", MEASURE))
    done = browse(copy.as_uri(), width, "--dump-dom", f"--screenshot={folder}/screen-{width}.png")
    wide = re.search(r'data-wide="(-?\d+)"', done.stdout)
    assert wide and int(wide[1]) <= 0, "only tables may be wider, and they scroll"
    assert "CONSOLE" not in done.stderr
    assert not re.search(r"net::ERR|Failed to load", done.stderr)


def test_the_listener_hears_a_broken_page(folder: Path) -> None:
    copy = folder / "broken.html"
    copy.write_text("<body><script>console.error('heard'); nowhere()</script><div style='width:3000px'>x</div></body>")
    done = browse(copy.as_uri(), 820, "--dump-dom")
    assert "CONSOLE" in done.stderr and "nowhere is not defined" in done.stderr


def audited(page_html: str, copy: Path, scheme: str) -> list[tuple[str, list[str]]]:
    """The rules that a page breaks, and the elements that break them."""
    copy.write_text(page_html.replace("</body>", f"<script>{AXE.read_text()}</script>{AUDIT}"))
    asked = ("--dump-dom", "--virtual-time-budget=20000", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}")
    told = re.search(r'<pre id="axe">(.*?)</pre>', browse(copy.as_uri(), 820, *asked).stdout, re.DOTALL)
    assert told, "axe-core did not finish"
    return [(rule, elements) for rule, elements in json.loads(html.unescape(told[1]))]


needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="no axe-core here; .ci/axe fetches it")


@needs_axe
@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing_to_mend(folder: Path, scheme: str) -> None:
    assert audited((folder / "report.html").read_text(), folder / f"axe-{scheme}.html", scheme) == []


@needs_axe
def test_axe_finds_what_is_planted(folder: Path) -> None:
    broken = (
        "<html><title>x</title><body><main><h1>x</h1><img src='data:,'><p style='color:#ccc'>pale</p></main></body>"
    )
    rules = {rule for rule, _ in audited(broken, folder / "axe-broken.html", "light")}
    assert {"html-has-lang", "image-alt", "color-contrast"} <= rules
