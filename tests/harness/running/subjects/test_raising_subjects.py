"""Subjects that raise, end their process, go to another folder or spoil what is written after the run.

Frames are in the message, the traceback in a file, exit status 1, and every verdict where it belongs.
"""

import json
import os
import pickle
import re
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from shardproof.harness.diagnosing.tracebacks import last_frames, whole_traceback
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.errors import Desynchronised, Position, RankDied, RankRaised, TimeLimit
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from shardproof.reports.stored import frames
from tests.harness.command_line import ONE, CommandLine
from tests.harness.proofs import ran
from tests.harness.toy_subjects import wrong

ME = "tests.harness.running.subjects.test_raising_subjects:"
SMALL = "mode=tp tp=2 layers=1 hidden=16 heads=2 vocab=24 seq=4 micro=1 steps=1"


def failing(case: Case, device: torch.device) -> object:
    """The last rank ends in the way that the seed says, three calls below."""
    if torch.distributed.get_rank() == case.world_size - 1:
        _in_a_layer(case.seed)
    return subject(case, device)


def alone(case: Case, device: torch.device) -> None:
    """Raises without torch.distributed."""
    _in_a_layer(1)


def _in_a_layer(seed: int) -> None:
    _in_a_linear(seed)


def _in_a_linear(seed: int) -> NoReturn:
    if seed == 2:
        os._exit(3)
    if seed in (3, 4):
        os.kill(os.getpid(), signal.SIGSEGV if seed == 3 else signal.SIGKILL)
    raise ValueError("bad layer")


def test_the_last_frames_are_in_the_message_and_the_traceback_in_the_run_folder(
    tmp_path: Path, shardproof: CommandLine
) -> None:
    status, out, _ = shardproof("run", ONE, "--subject", f"{ME}alone", "--timeout", "30")
    assert status == 1
    (first,) = [line for line in out.splitlines() if line.startswith("first:")]
    here = r"\S*test_raising_subjects.py:\d+ in "
    callers = rf", called from {here}_in_a_layer: _in_a_linear\(seed\), called from {here}alone: _in_a_layer\(1\)"
    assert re.search(rf"{here}_in_a_linear: raise ValueError\(.*{callers}", first)
    (file,) = re.findall(r"the whole traceback is in (\S+) of the run folder", out)
    text = (tmp_path / "runs" / "latest" / file).read_text()
    assert text.startswith("Traceback (most recent call last):") and "ValueError: bad layer" in text
    assert "--timeout 30" in out, "repeated as it was run"


def test_seconds_that_are_none_are_refused(shardproof: CommandLine) -> None:
    for command, words in (("run", ("0", "-1", "nan", "inf", "ten", "1e9")), ("faults", ("0",))):
        for word in words:
            rule = f"timeout={word}: must be a number of seconds above 0 and at most 604800; legal: --timeout 60"
            assert rule in shardproof.refused(command, f"--timeout={word}")


def test_what_a_subject_does_to_its_process_is_its_failure_and_a_kill_is_the_machines(
    tmp_path: Path, pool: PoolEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardproof.harness.running.run.engine_named", lambda _: nullcontext(pool))
    cases = (f"{SMALL} seed={seed}" for seed in (1, 2, 3, 4))
    result = ran(tmp_path, f"{ME}failing", *cases, engine="pool")
    verdicts = [(verdict.check, verdict.verdict) for verdict in result.verdicts]
    assert verdicts == [("run", "fail")] * 3 + [("run", "unknown")]
    assert result.exit_status == 1
    raised, left, crashed, killed = (verdict.message for verdict in result.verdicts)
    assert "in _in_a_linear: raise ValueError(" in raised and ", called from " in raised
    (file,) = re.findall(r"the whole traceback is in (\S+) of the run folder", raised)
    assert "in _in_a_layer" in (result.path / file).read_text()
    assert left.startswith("what:   the subject did not finish: rank 1 of 2 died: its process ended with exit status 3")
    assert crashed.startswith("what:   the subject did not finish: rank 1 of 2 died: killed by SIGSEGV")
    assert killed.startswith("what:   the machine failed: rank 1 of 2 died: killed by SIGKILL")
    assert "causes: the process of a rank ended before the subject returned" in left


def test_frames_are_those_of_the_last_exception_and_of_the_users_code() -> None:
    try:
        try:
            _in_a_layer(0)
        except ValueError:
            torch.ones(2).view(3), "\ud800"
    except RuntimeError as problem:
        error = RankRaised("rank 0 raised", ranks=(0,), positions=())
        error.__cause__ = problem
    text = whole_traceback(error)
    assert "During handling of the above exception" in text
    assert re.fullmatch(r"\S+:\d+ in test_frames_\w+: torch.ones\(2\).view\(3\), .*", last_frames(text))
    assert last_frames("") == whole_traceback(RankRaised("", ranks=(), positions=())) == ""


def test_an_error_of_a_run_is_the_same_in_another_process() -> None:
    here = Position(rank=1, state="finished")
    for error in (
        Desynchronised("ranks part", kind="skipped", ranks=[1], positions=[here]),
        TimeLimit("no end", ranks=[0], positions=[], abandoned=[0]),
    ):
        sent = pickle.loads(pickle.dumps(error))
        assert (type(sent), str(sent), vars(sent)) == (type(error), str(error), vars(error))


def going(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    """Wrong, and leaves for another folder."""
    outcome = wrong(case, device)
    os.chdir("/")
    return outcome


def spoiling(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    """Wrong, and puts a folder where the script was to be."""
    Path("repro.py").mkdir(exist_ok=True)
    return wrong(case, device)


def test_a_subject_that_leaves_its_folder_loses_no_verdict(shardproof: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("We hold these truths to be self-evident. " * 40)
    words = ("run", ONE, f"{ONE} seed=3", "--data", "corpus.txt", "--emit-repro", "repro.py")
    status, out, err = shardproof(*words, "--subject", f"{ME}going")
    assert status == 1 and "[2/2] fail" in err
    assert "note: repro.py repeats " in out and (tmp_path / "repro.py").is_file()
    folder = (tmp_path / "runs" / "latest").resolve()
    assert f"\nruns/{folder.name}  (report.html opens offline" in out, "the path as it was asked for"
    assert len(set(frames.load(folder).verdicts["case"])) == 2
    assert (folder / "report.html").is_file()


def test_a_module_that_leaves_on_import_takes_no_run_along(
    shardproof: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "import os\nfrom tests.harness.toy_subjects import right as subject\nos.chdir('/')\n"
    (tmp_path / "my_roaming_subject.py").write_text(text)
    status, out, _ = shardproof("run", ONE, "--subject", "my_roaming_subject:subject", "--json")
    assert status == 0
    assert Path.cwd() == tmp_path and (tmp_path / json.loads(out)["run"] / "verdicts.jsonl").is_file()


def test_a_script_that_cannot_be_written_in_the_end_takes_no_verdict_along(
    shardproof: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("run", ONE, "--subject", f"{ME}spoiling", "--emit-repro", "repro.py")
    status, out, _ = shardproof(*words)
    assert status == 1 and "\nwhat:" in out
    assert "note: emit-repro=repro.py: cannot be written (Is a directory); legal: a file in a folder with" in out
    Path("repro.py").rmdir()

    def dying(*_: object) -> str:
        raise RankDied("rank 0 ended with status 9", ranks=(0,), positions=())

    monkeypatch.setattr("shardproof.harness.reproducing.repro.emit", dying)
    status, out, _ = shardproof(*words, "--json")
    assert status == 1 and "rank 0 ended with status 9" in json.loads(out)["notes"]
    Path("repro.py").rmdir()
    monkeypatch.setattr("shardproof.harness.reproducing.repro.emit", lambda *_: 1 / 0)
    status, out, _ = shardproof(*words)
    assert status == 1 and "note: repro.py was not written: ZeroDivisionError: division by zero\n" in out
