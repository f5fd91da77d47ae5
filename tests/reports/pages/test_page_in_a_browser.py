"""The page in a real browser: no console message, no request, nothing wider than the screen, at three widths.

Screenshots land in the test's folder. Skipped where no Chromium is installed. axe-core's rules of accessibility are put
to a copy of the page where `.ci/axe` has fetched them. The page of the default run, and all its figures:
test_default_run.
"""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from tests import ROOT

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

NOISE = re.compile(r"CONSOLE|net::ERR|Failed to load")
"""Words of Chromium about a page that is not silent."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; apt-get install chromium")


def browse(url: str, width: int, *words: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM
    listening = ("--enable-logging=stderr", "--v=0", f"--window-size={width},2000")
    command = [CHROMIUM, *ALONE, *listening, *words, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_and_is_silent(html: str, tmp_path: Path, width: int) -> None:
    copy = tmp_path / "measured.html"
    copy.write_text(html.replace("</body>", MEASURE))
    done = browse(copy.as_uri(), width, "--dump-dom", f"--screenshot={tmp_path}/screen-{width}.png")
    wide = re.search(r'data-wide="(-?\d+)"', done.stdout)
    assert wide and int(wide[1]) <= 0, "only tables may be wider, and they scroll"
    assert not NOISE.search(done.stderr)


def test_the_listener_hears_a_broken_page(tmp_path: Path) -> None:
    copy = tmp_path / "broken.html"
    copy.write_text("<body><script>console.error('heard'); nowhere()</script><div style='width:3000px'>x</div></body>")
    done = browse(copy.as_uri(), 820, "--dump-dom")
    assert NOISE.search(done.stderr) and "nowhere is not defined" in done.stderr


def audited(page_html: str, copy: Path, scheme: str) -> list[tuple[str, list[str]]]:
    """The rules that a page breaks, and the elements that break them."""
    copy.write_text(page_html.replace("</body>", f"<script>{AXE.read_text()}</script>{AUDIT}"))
    asked = ("--dump-dom", "--virtual-time-budget=20000", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}")
    told = re.search(r'<pre id="axe">(.*?)</pre>', browse(copy.as_uri(), 820, *asked).stdout, re.DOTALL)
    assert told, "axe-core did not finish"
    return [(rule, elements) for rule, elements in json.loads(unescape(told[1]))]


needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="no axe-core here; .ci/axe fetches it")


@needs_axe
@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing_to_mend(html: str, tmp_path: Path, scheme: str) -> None:
    assert audited(html, tmp_path / "axe.html", scheme) == []


@needs_axe
def test_axe_finds_what_is_planted(tmp_path: Path) -> None:
    main = "<main><h1>x</h1><img src='data:,'><p style='color:#ccc'>pale</p></main>"
    broken = f"<html><title>x</title><body>{main}</body>"
    rules = {rule for rule, _ in audited(broken, tmp_path / "axe.html", "light")}
    assert {"html-has-lang", "image-alt", "color-contrast"} <= rules
