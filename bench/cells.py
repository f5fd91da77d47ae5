"""The cells of the matrix of other people's systems, read from their table (`bench/systems.txt`)."""

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from bench.environments import ROOT

PASSED, DEFECT = "pass", "known defect"
MEGATRON, TABLE = ROOT / "docs" / "megatron.md", ROOT / "bench" / "systems.txt"
THIS = "python{}.{}".format(*sys.version_info)


class System(NamedTuple):
    """A system: its packages, the first its own, and its Python where another one runs this command.

    Packages have versions where these are not those of constraints.txt. `checkout` is the variable that names its code.
    """

    name: str
    packages: tuple[str, ...]
    python: str = ""
    checkout: str = ""

    @property
    def package(self) -> str:
        """The name of its own package; of a checkout the word before its commit."""
        return "commit" if self.checkout else self.packages[0].partition("==")[0]

    @property
    def is_here(self) -> bool:
        """Whether the Python that runs this is its own and has its packages."""
        return self.python in {"", THIS} and all(map(_is_installed, self.packages))


class Cell(NamedTuple):
    """A cell; `needle` is a text that the output must have where the cell is not expected to pass.

    `kept`: whether the page keeps its calls and bytes.
    """

    system: System
    subject: str
    feature: str
    case: str
    engine: str = "inproc"
    quick: bool = False
    expected: str = PASSED
    needle: str = ""
    finding: str = ""
    kept: bool = True


def cells() -> Iterator[Cell]:
    """Every cell, system by system."""
    for block in TABLE.read_text("utf-8").split("\n# ")[1:]:
        heading, *rows = block.splitlines()
        name, packages, python = (*heading.split(": "), "")[:3]
        words = packages.split()
        variable = next((word[1:] for word in words if word.startswith("$")), "")
        system = System(name, tuple(word for word in words if not word.startswith("$")), python, variable)
        for row in filter(None, rows):
            subject, feature, case, marks = (*row.split(" | "), "")[:4]
            kind, _, rest = marks.partition(": ")
            needle, _, finding = rest.partition(": ")
            expected, engine = kind if rest else PASSED, "pool" if "pool" in marks.split() else "inproc"
            start, _, values = case.rstrip("}").partition("{")
            for value in values.split(","):
                where = (system, subject, feature, start + value, engine)
                yield Cell(*where, "quick" in marks.split(), expected, needle, finding, "unkept" not in marks.split())
        if "experts" in name and not python:
            known = re.findall(r"^\| (.+) \| `(mcore_\w+)` \| `(.+)` \| `(.+)` \|$", MEGATRON.read_text("utf-8"), re.M)
            for defect, subject, words, module in known:
                place = (system, subject, "as in megatron.md", f"{words} steps=1 micro=1")
                yield Cell(*place, expected=DEFECT, needle=module, finding=f"docs/megatron.md: {defect}")


def _is_installed(package: str) -> bool:
    name, _, wanted = package.partition("==")
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return not wanted or found.partition("+")[0] == wanted
