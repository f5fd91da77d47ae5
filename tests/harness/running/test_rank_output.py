"""What ranks print is shown once, with how often: prints and lines of loggers, over all ranks and runs of a case."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.running.ranks.output import rank_output, shown_once
from harness.running.request import Request
from harness.running.run import run
from harness.subject import cases_of, named
from suites.subjects import mlp

LOG = logging.getLogger(__name__)


def subject(case: object, device: torch.device) -> object:
    """Prints in all ways; one line is each rank's own."""
    print("hello")
    print("hello")
    print("rank", dist.get_rank())
    print("stray", file=sys.stderr)
    LOG.warning("logged")
    print("no end", end="")
    return mlp.subject(case, device)


subject.truth, subject.words = mlp.truth, mlp.subject.words  # type: ignore[attr-defined]
subject.refuses, subject.cases = mlp.subject.refuses, ("tp=2",)  # type: ignore[attr-defined]


def test_what_every_rank_prints_in_every_run_is_shown_once_with_how_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = named(f"{__name__}:subject")
    handler = logging.StreamHandler(sys.stderr)  # made before the run, as libraries do
    LOG.addHandler(handler)
    try:
        result = run(Request(cases=cases_of(("tp=2",), given), subject=given, out=tmp_path))
    finally:
        LOG.removeHandler(handler)
    out, err = capsys.readouterr()
    assert result.exit_status == 0
    assert handler.stream is sys.stderr
    lines = [line for line in out.splitlines() if "rank" not in line]
    assert lines == ["hello", "hello", "no end"]  # of what a rank itself repeats, nothing is lost
    assert {"rank 0", "rank 1"} <= set(out.splitlines())
    assert err.splitlines().count("stray") == 1 and err.splitlines().count("logged") == 1
    told = re.search(r"\(what the ranks repeated is shown once: \d+ lines, (\d+) to (\d+) times\)", err)
    assert told is not None and 2 <= int(told[1]) <= int(told[2])  # two ranks, several runs


def test_others_than_ranks_and_lines_that_are_flushed_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_once():
        for _rank in range(2):
            print("truth")
            with rank_output():
                print("progress", end="\r", flush=True)
    out, err = capsys.readouterr()
    assert out == "truth\nprogress\r" * 2
    assert err == ""
