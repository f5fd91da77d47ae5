"""Sessions on real processes: every witness sees what the recorder saw, and none changes a bit of the outcome."""

from __future__ import annotations

import os
import pickle
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cases import parse_cases
from harness.checking.evidence import FAIL, PASS, UNKNOWN
from harness.engines.processes.rank_program import RankResult
from harness.errors import MachineError
from harness.running.witnessing import witnesses
from harness.witnesses import measured
from harness.witnesses import session as session_module
from harness.witnesses.measured import SessionRequest
from harness.witnesses.nsys import command, database_of, nsys_path, on_gpus
from harness.witnesses.session import hold
from tests.forked import started
from tests.harness.witnesses.stepped_subject import CALLS, subject

NAME = "tests.harness.witnesses.stepped_subject:subject"
NSYS = pytest.mark.skipif(nsys_path() is None, reason="nsys is not on PATH (Debian: nsight-systems, non-free)")


def forked(_program: object, folder: Path, limit_s: float, environment: dict[str, str]) -> None:
    """The ranks of a session's only world size, in processes that need not import torch again."""
    job: SessionRequest = pickle.loads((folder / "job.pickle").read_bytes())
    words = {name: environment[name] for name in ("TORCH_FR_BUFFER_SIZE", "KINETO_LOG_LEVEL")}
    ranks = [started(measured._rank, rank, 2, folder, job, folder=folder, environment=words) for rank in range(2)]
    assert [rank.ended(limit_s) for rank in ranks] == [0, 0], ranks[0].err


@pytest.mark.parametrize("tool", ["torch", pytest.param("nsys", marks=NSYS)])
def test_a_model_with_views_changed_in_place_is_seen_alike_by_every_witness(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_run", forked)
    (case,) = parse_cases(["mode=tp tp=2 steps=2 seed=9"])
    seen = witnesses([case], NAME, (tool,), tmp_path, device="cpu", timeout_s=60.0)
    assert tool in seen.sessions, seen.notes
    (session,) = seen.sessions[tool].values()
    assert session.disturbed == ()
    told = seen.told(case, (), subject.expected(case))  # type: ignore[attr-defined]
    assert told.verdict.verdict == PASS, told.verdict.message
    assert told.verdict.message == f"ledger, {tool}, closed_form agree on {4 * CALLS} events of 2 ranks"
    assert told.verdict.unchecked == ()
    columns, rows = told.tables["witnesses.csv"]
    assert [row[columns.index(tool)] for row in rows] == ["="] * 4 * CALLS

    # One bit of an outcome, one event less, a rank that failed: none is a pass.
    (text,) = seen.sessions[tool]
    other = (replace(session.ranks[0], watched="other"), session.ranks[1])
    for spoiled, verdict, words in (
        (
            replace(session, ranks=other),
            FAIL,
            "the outcome of rank 0 is not the same bit for bit when the recorder and",
        ),
        (replace(session, seen=session.seen[1:]), FAIL, f"{tool} saw nothing"),
        (replace(session, problem="rank 1 failed: why"), UNKNOWN, "nothing was witnessed: rank 1 failed: why"),
    ):
        verdict_ = replace(seen, sessions={tool: {text: spoiled}}).told(case, (), None).verdict
        assert (verdict_.verdict, words in verdict_.message) == (verdict, True)


def test_a_missing_nsys_is_one_sentence_and_takes_nothing_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cases = parse_cases(["mode=tp tp=2 steps=2 seed=9"])
    seen = witnesses(cases, NAME, ("nsys",), tmp_path / "traces", device="cpu", timeout_s=5.0)
    assert seen.sessions == {}
    assert seen.notes[-1].startswith("witness nsys is missing: nsys is not on PATH (Debian: nsight-systems")
    told = seen.told(cases[0], (), None)
    assert told.verdict.verdict == UNKNOWN
    assert "nsys is not on PATH" in told.verdict.message


def test_a_broken_nsys_is_one_sentence_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "nsys"
    broken.write_text("#!/bin/sh\necho 'no license for you'\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(MachineError, match="witness nsys is missing: nsys ended with status 3: no license for you"):
        database_of(["true"], tmp_path, device="cpu", timeout_s=20.0, environment=os.environ)
    broken.write_text("#!/bin/sh\nsleep 60\n")
    with pytest.raises(MachineError, match="nsys did not end within 1 s"):
        database_of(["true"], tmp_path, device="cpu", timeout_s=1.0, environment=os.environ)


def test_a_rank_that_failed_or_left_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = parse_cases(["mode=tp tp=2 steps=2 seed=9"])
    job = SessionRequest(subject=NAME, cases=(case,), tool="torch")
    monkeypatch.setattr(session_module, "_run", lambda *_: None)
    (session,) = hold(job, tmp_path).values()
    assert session.problem.startswith("rank 0 left no result")
    end = RankResult(rank=0, error=ValueError("why"))
    (tmp_path / "0" / "rank0.pickle").write_bytes(pickle.dumps(end))
    (session,) = hold(job, tmp_path).values()
    assert session.problem == "rank 0 failed: ValueError: why"


def test_commands_trace_ranges_on_a_cpu_and_a_capture_range_on_a_gpu() -> None:
    here = command("nsys", Path("x"), ["program"])
    assert here[:3] == ["nsys", "profile", "--trace=nvtx"]
    assert here[-1] == "program"
    there = on_gpus()
    assert "--trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=stop" in there
    assert there.endswith("python -m shardproof.child harness.witnesses.measured FOLDER")
