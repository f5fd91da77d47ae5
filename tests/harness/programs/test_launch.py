"""A recorded program starts as Python would start it; ranks of a launch share one folder; wrong words are refused."""

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardproof.harness.errors import RequestError
from shardproof.harness.programs.session import Options, ProgramSession, shared_session
from shardproof.record import main
from shardproof.reports.stored.frames import load
from tests.harness.command_line import CommandLine
from tests.harness.programs.launched import environment, ran

OPTIONS: Options = {"steps": None, "profile": (), "silence_s": 60.0, "stated": {}, "values": None}
TELLS = """
import json, os, sys
print(json.dumps([sys.argv, __name__, __file__, __package__, sys.path[0], sys.flags.utf8_mode, __spec__ is None,
                  [path for path in sys.path if "hook" in path]]))
print("on stderr", file=sys.stderr)
if "raise" in sys.argv:
    raise ValueError("the program's own")
sys.exit(7)
"""


def record(*words: str) -> list[str]:
    return [sys.executable, "-X", "utf8", "-m", "shardproof.record", *words]


def announced(folder: Path) -> str:
    """The line in which a recording begins."""
    return f"shardproof: recording into runs/{os.readlink(folder / 'runs' / 'latest')}\n"


@pytest.mark.parametrize("words", [["own.py", "--x", "a b", ""], ["-m", "own", "raise"]])
def test_arguments_main_exit_code_and_output_are_those_of_python(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "own.py").write_text(TELLS)
    plain = ran(tmp_path, sys.executable, "-X", "utf8", *words)
    recorded = ran(tmp_path, *record(*words))
    assert recorded.returncode == plain.returncode == (1 if "raise" in words else 7)
    assert recorded.stdout == plain.stdout
    assert recorded.stderr == announced(tmp_path) + plain.stderr


def test_a_whole_command_and_the_programs_own_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import sys; print(sys.modules['sitecustomize'].__file__, sys.argv)")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('own sitecustomize')")
    path = {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{environment(tmp_path)['PYTHONPATH']}"}
    command = ["sh", "-c", f"{sys.executable} own.py 'a b'"]
    plain = ran(tmp_path, *command, **path)
    recorded = ran(tmp_path, sys.executable, "-m", "shardproof", "record", "--", *command, **path)
    assert "own sitecustomize" in plain.stdout
    once_more = "own sitecustomize\n"  # in the process of `shardproof record` itself
    assert (recorded.returncode, recorded.stdout) == (plain.returncode, once_more + plain.stdout)
    assert recorded.stderr == announced(tmp_path)


def test_nsys_wraps_the_whole_command(tmp_path: Path) -> None:
    tool = tmp_path / "nsys"
    tool.write_text('#!/bin/sh\necho "$@"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    ended = ran(tmp_path, *[sys.executable, "-m", "shardproof"], "record", "--profile", "nsys", "--", "sh", "x", **path)
    assert ended.returncode == 0
    assert ended.stdout.startswith("profile --trace=")
    assert ended.stdout.endswith(f"/{os.readlink(tmp_path / 'runs' / 'latest')}/traces/nsys sh x\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "3:2", "x.py"], "steps=3:2: holds no step, for END is not included; legal: --steps 10:20"),
        (["--steps", "3", "x.py"], "steps=3: must be FIRST:END"),
        (["--profile", "torch", "x.py"], "profile=torch: torch's profiler keeps"),
        (["--profile", "nsys", "x.py"], "legal: shardproof record --profile nsys -- torchrun"),
        (["--profile", "perf", "x.py"], "profile=perf: is not a profiler; legal: torch,nsys"),
        (["--tokens", "0", "x.py"], "tokens=0: must be the tokens of all ranks in one step"),
        (["--silence", "0", "x.py"], "silence=0: must be seconds, at least 1; legal: --silence 60"),
        ([], "shardproof: program: is missing; legal: python -m shardproof.record train.py\n"),
        (["--", "no-such-command"], "record: command=no-such-command: is not on PATH; legal: torchrun"),
    ],
)
def test_wrong_words_are_one_line(
    words: Sequence[str], message: str, shardproof: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[:1] == ["--"]:
        err = shardproof.refused("record", *words)
    else:
        assert main(words) == 2
        err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not Path("runs").exists()


def test_ranks_of_a_launch_share_a_folder_and_later_launches_have_their_own(tmp_path: Path) -> None:
    out = str(tmp_path)
    launch = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    first, made = shared_session(out, "train", ["train.py"], launch, OPTIONS)
    second, again = shared_session(out, "train", ["train.py"], {**launch, "RANK": "1"}, OPTIONS)
    assert (made, again) == (True, False)
    assert first == second == ProgramSession.of(first.text)
    others = [
        shared_session(out, "train", ["train.py"], words, OPTIONS)[0].folder
        for words in ({**launch, "MASTER_PORT": "2"}, {**launch, "TORCHELASTIC_RESTART_COUNT": "1"}, {}, {})
    ]
    assert len({first.folder, *others}) == 5
    tickets = [path for path in (tmp_path / ".sessions").iterdir() if not path.suffix]
    (ticket,) = (path for path in tickets if path.read_text() == first.text)
    os.utime(ticket, (1.0, 1.0))  # a launch of long ago with the same port and name
    assert shared_session(out, "train", ["train.py"], launch, OPTIONS)[1]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="out=.*: the run folder cannot be written"):
        shared_session(str(tmp_path / "file"), "train", [], {}, OPTIONS)


def test_a_program_that_does_not_communicate_leaves_nothing_and_that_is_said(tmp_path: Path) -> None:
    shared_session(str(tmp_path), "train", ["train.py"], {}, OPTIONS)
    with pytest.raises(RequestError, match="nothing was recorded: no process of the program has initialised"):
        load(tmp_path / "latest")
