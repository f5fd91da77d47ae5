"""docs/verify.md as it stands, in an empty folder: files are written, commands run in their order, outputs compared."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from reports.commands import cli
from tests import ROOT

PAGE = (ROOT / "docs" / "verify.md").read_text()
FEW = "--hypothesis-profile=one-case -p no:cacheprovider -k 'stored or losses'"
"""An example of a few properties: the page is tested here."""
ROUNDING = re.compile(r"\S+( / \d)")
"""An error that rounding leaves, beside what is allowed: it differs between machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of the page: `kind` is sh, text, or python with the file that it goes to."""

    kind: str
    file: str
    text: str


def blocks(page: str) -> list[Block]:
    found = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [Block(kind=kind, file=file, text=text) for kind, file, text in found]


def run(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Output of a command line, after its exit status was compared with the one in its comment (0)."""
    command, _, status = line.partition("  # exit status ")
    program, *words = shlex.split(command)
    capsys.readouterr()
    if program == "shardproof":
        found, printed = cli.main(words), capsys.readouterr().out
    else:
        shell = f"{sys.executable} -m {command}" if program == "pytest" else command
        env = {**os.environ, "PYTEST_ADDOPTS": FEW, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(shell, shell=True, env=env, capture_output=True, text=True, check=False, timeout=300)
        found, printed = done.returncode, done.stdout + done.stderr
    assert found == int(status or 0), f"{line}\n{printed}"
    return printed


def test_every_block_of_the_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    told = ""
    for block in blocks(PAGE):
        if block.kind == "python":
            with Path(block.file).open("a") as file:
                file.write(("\n\n" if file.tell() else "") + block.text)
            sys.modules.pop(Path(block.file).stem, None)
        elif block.kind == "sh":
            told = "\n".join(run(line, capsys) for line in block.text.splitlines())
        else:
            printed = {ROUNDING.sub(r"#\1", line) for line in told.splitlines()}
            lines = [ROUNDING.sub(r"#\1", line) for line in block.text.splitlines()]
            assert [line for line in lines if not any(one.startswith(line) for one in printed)] == [], told


def test_the_page_has_all_kinds_of_blocks() -> None:
    assert {block.kind for block in blocks(PAGE)} == {"python", "sh", "text"}
    first = next(block for block in blocks(PAGE) if block.kind == "python")
    assert first.text.count("\n") <= 40, "an afternoon and about 40 lines"
