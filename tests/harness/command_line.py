"""The command line as the tests call it: in a folder of its own, with toy subjects and an engine without threads."""

from pathlib import Path

import pytest

from shardproof.harness.running.engines import ENGINES
from shardproof.reports.commands import cli

TOY = "tests.harness.toy_subjects:"
ONE = "mode=tp tp=1 layers=1 hidden=16 heads=2 vocab=24 seq=8 micro=1 steps=1"
"""Case of one rank: nothing to communicate, everything to compare."""
Printed = tuple[int, str, str]
"""Exit status, stdout, stderr."""


class CommandLine:
    """Calls the command line in a folder of its own and hands back what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> Printed:
        """Run a command; a run looks for a line `when:`, which takes seconds, only if its words say so."""
        self._capsys.readouterr()
        quick = ("--when", "0") if words[:1] == ("run",) and "--when" not in words else ()
        status = cli.main([*words, *quick])
        printed = self._capsys.readouterr()
        return status, printed.out, printed.err

    def refused(self, *words: str) -> str:
        """The one message of a wrong request: status 2, nothing on stdout, no traceback."""
        status, out, err = self(*words)
        assert (status, out) == (2, ""), err
        assert "Traceback" not in err
        assert err.count("\n") == 1 and err.startswith("shardproof"), err
        return err


def command_line(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """A command line that stands in this folder."""
    monkeypatch.setitem(ENGINES, "inproc", "tests.harness.toy_subjects:LoopEngine")
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # no second process, which would have the real engine
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder)
    return CommandLine(capsys)
