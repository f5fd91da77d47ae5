""".ci/nsys: the mirror is that of the machine's own apt sources, whatever their form; without one, the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT

KEY = "/usr/share/keyrings/mine.gpg"
STANZAS = f"""
Types: deb deb-src
# a comment
URIs: http://security.invalid/debian-security
Suites: bookworm-security
Components: main
Signed-By: {KEY}

Types: deb
URIs: http://off.invalid/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb
URIs: http://mirror.invalid/debian
  http://second.invalid/debian
Suites: bookworm
  bookworm-updates
Components: main
Signed-By: {KEY}
"""
KINDS = {
    "deb822": ("debian.sources", STANZAS, f"deb [signed-by={KEY}] http://mirror.invalid/debian bookworm"),
    "one line": (
        "debian.list",
        "# deb http://off.invalid/debian bookworm main\ndeb-src http://off.invalid/debian bookworm main\n"
        "deb http://other.invalid/apt nodistro main\n"
        f"deb [arch=amd64 signed-by={KEY}] http://mirror.invalid/debian bookworm contrib main # mine\n",
        f"deb [arch=amd64 signed-by={KEY}] http://mirror.invalid/debian bookworm",
    ),
    "plain": (
        "debian.list",
        "deb http://mirror.invalid/debian bookworm main",
        "deb http://mirror.invalid/debian bookworm",
    ),
}


def fetched(folder: Path, file: str, text: str) -> subprocess.CompletedProcess[str]:
    """The script on a Debian with this file of sources, where apt-get prints the source that it was given and fails."""
    for place in (".ci", "etc/apt/sources.list.d", "bin"):
        (folder / place).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "nsys", folder / ".ci")
    (folder / "etc" / "os-release").write_text("ID=debian\nVERSION_CODENAME=bookworm\n")
    (folder / "etc" / "apt" / "sources.list.d" / file).write_text(text)
    for name, words in {"apt-get": f"cat {folder}/.nsys/sources.list; exit 100", "dpkg": "exit 0"}.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{words}\n")
        (folder / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(folder / "bin"), "/usr/bin", "/bin"])
    env = {"PATH": path, "NSYS_ROOT": str(folder)}
    return subprocess.run([folder / ".ci" / "nsys"], env=env, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.skipif(shutil.which("nsys", path="/usr/bin:/bin") is not None, reason="nsys is installed here")
@pytest.mark.parametrize("kind", KINDS)
def test_the_mirror_is_that_of_the_machines_own_sources(kind: str, tmp_path: Path) -> None:
    file, text, source = KINDS[kind]
    done = fetched(tmp_path, file, text)
    assert done.returncode == 1 and done.stdout == ""
    told, reason = done.stderr.strip().splitlines()
    assert told == f"{source} main contrib non-free"
    assert reason == (
        "nsys: not here, and it could not be fetched from the mirror of apt's sources; its tests are skipped"
    )
    assert not (tmp_path / ".nsys").exists()


@pytest.mark.skipif(shutil.which("nsys", path="/usr/bin:/bin") is not None, reason="nsys is installed here")
def test_without_a_mirror_the_reason_is_said(tmp_path: Path) -> None:
    done = fetched(tmp_path, "other.list", "deb http://other.invalid/apt nodistro main\n")
    assert done.returncode == 1
    assert done.stderr == (
        "nsys: not here, and this machine's apt sources name no mirror of bookworm; its tests are skipped\n"
    )


def test_the_script_spells_out_no_host() -> None:
    assert "://" not in (ROOT / ".ci" / "nsys").read_text()
