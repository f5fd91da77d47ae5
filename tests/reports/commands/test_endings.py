"""A full disk and a Ctrl-C at a bad moment: one sentence, the right exit status, and nothing lost that was finished."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof.__main__ import main
from shardproof.harness.running.store import Store
from shardproof.reports.pages import page
from shardproof.reports.stored.frames import Run, load
from tests.forked import started
from tests.harness.command_line import ONE, TOY, CommandLine
from tests.reports import sample_run
from tests.shardproof.test_public_names import python

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_page_that_finds_no_room_takes_no_verdict_along(
    shardproof: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_written(_: Run, path: Path) -> Path:
        path.write_text("<html>")
        raise FULL

    monkeypatch.setattr(page, "write_page", half_written)
    for subject, status in (("right", 0), ("wrong", 1)):
        ended, out, err = shardproof("run", ONE, "--subject", f"{TOY}{subject}")
        assert ended == status and "Traceback" not in out + err
        assert "note: report.html was not written (No space left on device); `shardproof page RUN -o FILE`" in out
        assert out.count("\ntp ") == 1 and not Path("runs/latest/report.html").exists()


@pytest.mark.parametrize(("subject", "status"), [("right", 3), ("wrong", 1)])
def test_a_disk_that_is_full_ends_the_run_and_its_finished_cases_are_told(
    shardproof: CommandLine, monkeypatch: pytest.MonkeyPatch, subject: str, status: int
) -> None:
    """The second case finds no room. A failed check outweighs a failed machine."""
    append, room = Store._append, [1]

    def until_full(store: Store, name: str, text: str) -> None:
        if name == "verdicts.jsonl" and text and not room:
            raise FULL
        if name == "verdicts.jsonl" and text:
            room.clear()
        append(store, name, text)

    monkeypatch.setattr(Store, "_append", until_full)
    cases = [f"{ONE} seed={seed}" for seed in (1, 2, 3)]
    ended, out, err = shardproof("run", *cases, "--subject", f"{TOY}{subject}")
    assert ended == status and "Traceback" not in out + err
    assert "the run folder cannot be written (No space left on device); the cases finished before:" in err
    assert "[2/3] " in err and "[3/3] " not in err
    assert out.splitlines()[-1].startswith("3 cases: 1 pass" if subject == "right" else "3 cases: 0 pass, 1 fail")
    assert load("runs/latest").verdicts["case"].nunique() == 1
    room.clear()
    ended, out, err = shardproof("run", ONE, "--subject", f"{TOY}right")
    assert (ended, out) == (3, "") and err.splitlines()[-1].endswith("cannot be written (No space left on device)")


def on_a_full_disk(*words: str) -> int:
    """The command in a process whose standard output finds no room."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), sys.stdout.fileno())
    return main(words)


def test_output_and_a_ci_page_without_room_are_one_sentence(tmp_path: Path) -> None:
    sample_run.write(tmp_path / "run")
    done = started(on_a_full_disk, "show", "run", folder=tmp_path)
    told = "shardproof show: what it prints cannot be written (No space left on device)\n"
    assert (done.ended(), done.err) == (3, told)
    done = started(main, ("compare", "run", "run"), folder=tmp_path, environment={"GITHUB_STEP_SUMMARY": "/dev/full"})
    assert done.ended() == 0 and "GITHUB_STEP_SUMMARY=/dev/full: cannot be written" in done.err


INTERRUPTED = """
import signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder := Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)
from shardproof.__main__ import main
status = main(sys.argv[2:])
import pandas
assert pandas.DataFrame({"a": [1]}).size == 1 and Finder not in sys.meta_path
sys.exit(status)
"""
DEAR = pytest.mark.deep("four CPU seconds each: torch is imported")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("shardproof.reports.commands.cli", ["show", "run"]),
        pytest.param("pandas.core.indexes.range", ["show", "run"], marks=DEAR),
        pytest.param("numpy.matrixlib", ["run", ONE, "--when", "0"], marks=DEAR),
        ("pandas.io.parsers.readers", ["run", ONE, "--when", "0"]),
    ],
)
def test_a_ctrl_c_while_a_module_is_imported_is_one_sentence(tmp_path: Path, module: str, words: list[str]) -> None:
    """An interrupted numpy or pandas cannot be used, and not be imported again."""
    sample_run.write(tmp_path / "run")
    done = python(tmp_path, "-c", INTERRUPTED, module, *words)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr and "shardproof: interrupted" in done.stderr
    if words[0] == "run" and "pandas" in module:
        assert "the cases finished before:" in done.stderr and "\ntp " in done.stdout


_LAUNCHED = "import os, sys; {before}; os.execv(sys.executable, [sys.executable, '-m', 'shardproof', 'show', {run!r}])"


@pytest.mark.parametrize(
    ("before", "status", "said"),
    [
        ("os.close(0); os.close(1); os.close(2)", 0, ""),
        ("os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", 2, "the working directory was removed; legal: "),
    ],
)
def test_closed_streams_and_a_folder_that_is_gone_are_no_bug(
    tmp_path: Path, before: str, status: int, said: str
) -> None:
    run = sample_run.write(tmp_path / "run")
    program = _LAUNCHED.format(before=before, run=str(run))
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == status and said in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
