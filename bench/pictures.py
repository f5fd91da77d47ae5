"""The picture of the README: the page of a run of the README's example, taken by a browser.

    python -m bench.pictures

Runs the block `mlp.py` of README.md, which fails, and writes docs/page.png (1100 x 760 pixels, light). Needs Chromium.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "page.png"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_WORDS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,760")


def main() -> int:
    """Write the picture. Exit status 3 without a browser."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        print(f"bench.pictures: no browser here; legal: one of {', '.join(_BROWSERS)}", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as place:
        (example,) = re.findall(r"^```python mlp\.py\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
        (Path(place) / "mlp.py").write_text(example)
        seen = os.environ | {"PYTHONPATH": os.pathsep.join([place, str(ROOT)])}
        subprocess.run([sys.executable, "-m", "shardproof", "run", "--subject", "mlp:subject"], cwd=place, env=seen)  # noqa: PLW1510  (it fails, and is to)
        page = (Path(place) / "runs" / "latest" / "report.html").resolve().as_uri()
        subprocess.run([browser, *_WORDS, f"--screenshot={PICTURE}", page], check=True, timeout=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
