"""Commands in a terminal of 80 columns: what fits stays in it, and a failure has colour there and none in a pipe."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from reports.commands import cli
from tests.reports.test_text import ANSI, Terminal

COLUMNS = 80
SMALL = "mode=msp tp=2 layers=1 hidden=16 heads=4 kv_heads=4 ffn=32 vocab=97 seq=8 micro=1 steps=1"
COMMANDS = (
    f'run "{SMALL}"',
    f'run "{SMALL}" --variant norm-average --when 0',
    "show",
    f'names "{SMALL}"',
    f'help calls "{SMALL}"',
    "help case",
    f'predict "{SMALL}" "mode=tp tp=2"',
    "doctor",
)
FAILED, WRONG_REQUEST = 1, 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to run in, a terminal with colours of 80 columns, and no second process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path


def printed(command: str, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Exit status of a command, and what it prints to this stream."""
    words = [word or quoted for quoted, word in re.findall(r'"([^"]*)"|(\S+)', command)]
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        status = cli.main(words)
    return status, stream.getvalue()


def test_every_line_fits_and_a_failure_has_colour(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in COMMANDS:
        status, text = printed(command, Terminal(), monkeypatch)
        assert status == (FAILED if "--variant" in command else 0), command
        lines = [line.rsplit("\r")[-1].rstrip() for line in ANSI.sub("", text).splitlines()]
        wide = [line for line in lines if len(line) > COLUMNS and not line.startswith("repeat: ")]
        assert wide == [], command
        if command.startswith(("run", "show")):
            assert ("\x1b[1;31mfail" in text) is ("--variant" in command or command == "show"), command


def test_a_wrong_request_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (
        f'run "{SMALL} dtype=float128"',
        "run --out",
        "run --profile-steps 9:1 steps=2",
        "run mode=tp tp=2 x=1",
    ):
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        status, _ = printed(command, Terminal(), monkeypatch)
        lines = ANSI.sub("", terminal.getvalue()).splitlines()
        assert status == WRONG_REQUEST and max(map(len, lines)) <= COLUMNS <= len(" ".join(lines)), command


def test_a_pipe_has_no_colour_and_its_lines_are_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = printed(COMMANDS[1], io.StringIO(), monkeypatch)
    assert status == FAILED and "\x1b" not in text
    assert re.search(r"^first:  .{80,}$", text, re.MULTILINE) and re.search(r"^note: .{80,}$", text, re.MULTILINE)
