"""The page in a real browser: no console message, no request, nothing wider than the screen, at three widths.

Screenshots land in the test's folder. Skipped where no Chromium is installed. The page of the default run, and all its
figures: test_default_run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from reports import page
from reports.frames import load
from suites.meta import sample_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (390, 820, 1400)
ALONE = ("--headless=new", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND")
MEASURE = "<script>document.body.dataset.wide = document.documentElement.scrollWidth - innerWidth</script></body>"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; apt-get install chromium")


def browse(url: str, width: int, *words: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM
    listening = ("--enable-logging=stderr", "--v=0", f"--window-size={width},2000")
    return subprocess.run(
        [CHROMIUM, *ALONE, *listening, *words, url], capture_output=True, text=True, timeout=60, check=True
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
