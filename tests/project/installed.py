"""Shardproof as users have it: a wheel of this tree, and virtual environments for it; nothing is downloaded."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests import ROOT

ROOMS = ("bench", "bugs", "harness", "parallel", "reference", "reports", "shardproof", "suites")
LONGEST_S = 400
WORDS = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
"""For pip: from what lies here, and nothing else."""


def copied(source: Path) -> Path:
    """A copy of what shardproof is made of."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


def built(source: Path, out: Path) -> Path:
    """The wheel, built in the folder `out` from a copy."""
    command = [sys.executable, "-m", "pip", "wheel", *WORDS, "-w", str(out), str(copied(source))]
    subprocess.run(command, check=True, timeout=LONGEST_S)
    (found,) = out.iterdir()
    return found


def fresh_environment(folder: Path) -> Path:
    """A virtual environment with pip and all that is installed here, but for shardproof.

    Hypothesis reads the constants of every module outside of a `site-packages`: of torch, half a minute.
    """
    venv.create(folder, symlinks=True)
    seen = folder / "seen" / "site-packages"
    seen.mkdir(parents=True)
    for place in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")):
        for path in Path(place).iterdir():
            if "shardproof" not in path.name:
                (seen / path.name).symlink_to(path)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "seen.pth").write_text(f"{seen}\n")
    return folder
