"""FINDINGS.md: every script of docs/findings stands in it, and prints what it says when it is run."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import ROOT

PAGE = (ROOT / "FINDINGS.md").read_text()
SCRIPTS = ROOT / "docs" / "findings"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
NEEDS = {
    "megatron": "megatron.core",
    "deepspeed": "deepspeed",
    "transformers": "transformers",
    "torchtitan": "torchtitan",
}
"""Packages by the first word of a script's name."""
SHOWN = [(command, printed) for command, printed in re.findall(r"^    \$ (.+)\n((?:    .+\n)+)", PAGE, re.MULTILINE)]


def close(told: str, printed: str) -> bool:
    """Whether the words are the same, and the numbers too but for rounding."""
    numbers = [[float(one) for one in NUMBER.findall(text)] for text in (told, printed)]
    return NUMBER.sub("#", told) == NUMBER.sub("#", printed) and numbers[0] == pytest.approx(
        numbers[1], rel=1e-3, abs=2e-6
    )


def script_of(command: str) -> Path:
    return next(ROOT / word for word in shlex.split(command) if word.endswith(".py"))


def test_every_finding_has_its_script_and_every_script_its_finding() -> None:
    assert {script_of(command) for command, _ in SHOWN} == set(SCRIPTS.glob("*.py"))
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        if section.startswith(("Limits", "Seen")):
            continue
        title = section.splitlines()[0]
        for needed in ("Newest release that shows it:", "Upstream:", "    $ ", "Issue:"):
            assert needed in section, f"{title}: {needed}"


def test_no_script_needs_shardproof() -> None:
    rooms = r"^\s*(?:from|import) (?:shardproof|harness|parallel|reference|reports|suites)\b"
    assert [path.name for path in SCRIPTS.glob("*.py") if re.search(rooms, path.read_text(), re.MULTILINE)] == []


def test_other_numbers_or_other_words_are_seen() -> None:
    assert close("norm 1.0000, right 2", "norm 1.0001, right 2")
    assert not close("norm 1.0000, right 2", "norm 1.1000, right 2")
    assert not close("norm 1.0000, right 2", "norm 1.0000, wrong 2")


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.deep("10 to 30 CPU seconds each: packages are imported on every rank")
@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=[command.partition("findings/")[2] for command, _ in SHOWN])
def test_a_finding_is_there_as_the_page_says(command: str, printed: str) -> None:
    words = shlex.split(command)
    settings = {name: os.environ.get(name) for name, equals, _ in (word.partition("=") for word in words) if equals}
    if missing := [name for name, value in settings.items() if value is None]:
        pytest.skip(f"{missing[0]}: names no checkout")
    script = script_of(command)
    package = script.name.partition("_")[0]
    if package in NEEDS and find_spec(package) is None:
        pytest.skip(f"needs {package}")
    ended = subprocess.run(
        [sys.executable, str(script), *words[words.index(next(word for word in words if word.endswith(".py"))) + 1 :]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = [line.strip() for line in printed.splitlines()]
    version = next((line for line in told if re.match(r"[\w-]+ \d+\.\d+\.\d+", line)), "")
    found = ended.stdout.splitlines()
    if version and (named := version.partition(",")[0]) not in ended.stdout:
        pytest.skip(f"the page is about {named}")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    lost = [line for line in told if not any(close(line, one.strip()) for one in found)]
    assert lost == [], ended.stdout
