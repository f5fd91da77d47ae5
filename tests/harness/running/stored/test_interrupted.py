"""Ctrl-C, as a real signal to a real process: what was finished is stored and printed, and the exit status is 130."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.cases import parse_cases
from harness.interpreter import interrupted_after
from reference.case import Case
from reports.options import request
from reports.stored.frames import load
from shardproof.__main__ import main
from tests.forked import started
from tests.harness import toy_subjects

TWO_LAYERS = "mode=tp tp=1 layers=2 hidden=16 heads=2 vocab=24 seq=8"
_RUN = ["run", "--subject"]


def default_run(subject: str, cases: list[str]) -> int:
    """`shardproof run` without cases, when these are the default ones."""
    request.default_cases = lambda *_, **__: parse_cases(cases)
    sys.argv = ["shardproof", *_RUN, subject]
    return main()


def interrupted(folder: Path, program: Callable[..., int], *words: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a program that gets a SIGINT, with its whole group, once its slow part runs."""
    forked = started(program, *words, folder=folder)
    until_s = time.monotonic() + 60
    while not (folder / "started").exists() and forked.process.is_alive() and time.monotonic() < until_s:
        time.sleep(0.05)
    time.sleep(0.3)
    os.killpg(forked.pid, signal.SIGINT)
    status = forked.ended()
    assert (folder / "started").exists(), forked.err
    return status, forked.out, forked.err


def test_a_run_is_reported_whole_when_its_experiments_are_interrupted(tmp_path: Path) -> None:
    """And no script is looked for then."""
    command = [*_RUN, f"{__name__}:slow_shrink", TWO_LAYERS, "--emit-repro", "repro.py"]
    status, out, err = interrupted(tmp_path, main, command)
    assert status == 130 and "Traceback" not in err
    assert "\nwhat:" in out and "\nwhen:" not in out and "their lines `when:` are missing" in out
    assert "note: repro.py was not written: interrupted" in out
    assert (tmp_path / "runs" / "latest" / "report.html").exists() and not (tmp_path / "repro.py").exists()


def test_both_processes_of_the_default_run_are_interrupted(tmp_path: Path) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one processor: no second process")
    cases = [f"{TWO_LAYERS} seed={seed}" for seed in (2, 1, 3, 4, 5, 6)]
    status, out, err = interrupted(tmp_path, default_run, f"{__name__}:slow_second", cases)
    assert status == 130 and "interrupted" in err and "Traceback" not in err
    verdicts = load(tmp_path / "runs" / "latest").verdicts
    finished = verdicts["case"].nunique()
    assert 1 <= finished <= 5 and set(verdicts["verdict"]) == {"pass"}
    assert len([line for line in out.splitlines() if line.startswith("tp ")]) == finished
    assert not Path(f"/proc/{(tmp_path / 'started').read_text()}").exists(), "the process that proved it is still there"


def test_a_signal_while_a_case_is_stored_comes_after_it() -> None:
    stored = []
    with pytest.raises(KeyboardInterrupt), interrupted_after():
        signal.raise_signal(signal.SIGINT)
        stored.append("all of it")
    assert stored == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


STARTED = Path("started")
"""Made in the current folder when the slow part begins; it holds the id of the process."""


def slow_second(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The case of seed 1 does not end by itself."""
    if case.seed == 1:
        _wait()
    return toy_subjects.right(case, device)


def slow_shrink(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Wrong as it is; the smaller case of one layer, which a script is looked for in, does not end by itself."""
    if case.layers == 1:
        _wait()
    return toy_subjects.wrong(case, device)


def _wait() -> None:
    STARTED.write_text(str(os.getpid()))
    time.sleep(40)
