"""Badges of the README, as SVG files that follow from files of the repository.

    python -m bench.badges [--check]

Writes docs/badges/*.svg: planted bugs found (docs/evidence.md), modes proved (docs/default_run.md), and tested releases
of torch (`make compat`). With --check nothing is written: exit status 1 names each badge that is stale.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardproof.harness.torch_internals.lookup import TESTED
from shardproof.reference.language.core import MODES

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "badges"
PAGES = (ROOT / "docs" / "evidence.md", ROOT / "docs" / "default_run.md")
_GREEN, _RED, _WIDE = "#2e7d32", "#c62828", 7
"""The colour of a badge whose number is good, the colour of others, and the most pixels of a letter."""
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{name}: {value}">
  <title>{name}: {value}</title>
  <rect width="{width}" height="20" rx="3" fill="#555"/>
  <rect x="{left}" width="{right}" height="20" rx="3" fill="{colour}"/>
  <g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
    <text x="{middle}" y="14">{name}</text>
    <text x="{behind}" y="14">{value}</text>
  </g>
</svg>
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the badges, or compare them with those that are there."""
    parser = argparse.ArgumentParser(prog="bench.badges", description="badges of the README")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when one is stale")
    only_check = parser.parse_args(arguments).check
    stale = [path for path, text in badges(read_pages()).items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if only_check:
            print(f"{path.relative_to(ROOT)}: is stale; python -m bench.badges writes it", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(badges(read_pages())[path])
    return 1 if only_check and stale else 0


def read_pages() -> str:
    """The pages whose tables badges state."""
    return "".join(page.read_text() for page in PAGES)


def badges(page: str) -> Mapping[Path, str]:
    """Path and text of every badge, by the tables of PAGES."""
    rows = re.findall(r"^(\S+) +\d+ +\d+ .* (\w+)$", page, re.MULTILINE)
    proved = {
        mode for mode in MODES if (mode, "pass") in rows and {end for row, end in rows if row == mode} == {"pass"}
    }
    (killed,) = re.findall(r"^\| killed, of those .*$", page, re.MULTILINE)
    counts = [(int(found), int(of)) for found, of in re.findall(r"(\d+) of (\d+)", killed)]
    found, planted = (sum(numbers) for numbers in zip(*counts, strict=True))
    first, last = (".".join(map(str, release)) for release in TESTED)
    return {
        FOLDER / "bugs.svg": _badge("planted bugs found", f"{found} of {planted}", good=found >= 0.99 * planted),
        FOLDER / "modes.svg": _badge("modes proved", f"{len(proved)} of {len(MODES)}", good=len(proved) == len(MODES)),
        FOLDER / "torch.svg": _badge("torch", f"{first} to {last}", good=True),
    }


def _badge(name: str, value: str, *, good: bool) -> str:
    left, right = (len(text) * _WIDE + 12 for text in (name, value))
    places = {"left": left, "right": right, "width": left + right, "middle": left // 2, "behind": left + right // 2}
    return _SVG.format(name=name, value=value, colour=_GREEN if good else _RED, **places)


if __name__ == "__main__":
    sys.exit(main())
