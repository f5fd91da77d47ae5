"""Annotations of GitHub Actions: at a line of the repository, ten at most, and no text of a run steers them."""

import io
from pathlib import Path

import pytest

from shardproof.reports.printing.printable import annotate_failures
from tests.harness.command_line import TOY, CommandLine

CASE = "mode=tp tp=2 layers=1 hidden=16 heads=2 vocab=24 seq=8 micro=1 steps=1"


def annotated(*failures: tuple[str, str, str], **environment: str) -> list[str]:
    stream = io.StringIO()
    annotate_failures(failures, stream, environment)
    return stream.getvalue().splitlines()


def test_a_failure_is_shown_at_its_line_and_only_in_a_job(tmp_path: Path) -> None:
    (tmp_path / "a,b.py").touch()
    job = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(tmp_path)}
    assert annotated((f"{tmp_path}/a,b.py:3", "t: x", "one\ntwo 5 %"), **job) == [
        "::error file=a%2Cb.py,line=3,title=t%3A x::one%0Atwo 5 %25"
    ]
    for place in ("", "/etc/hostname:3", f"{tmp_path}/none.py:3", f"{tmp_path}/a,b.py:x"):
        assert annotated((place, "t", "one"), **job) == ["::error title=t::one"], "no file of this repository"
    assert annotated(("", "t\n::x::", "\x1b[2J"), **job) == ["::error title=t%0A%3A%3Ax%3A%3A::\\x1b[2J"]
    assert len(annotated(*[("", "t", "one")] * 30, **job)) == 10
    assert annotated(("", "t", "one")) == []


def test_a_run_and_a_comparison_annotate_what_fails(
    shardproof: CommandLine, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = str(runs["right"]), str(runs["gather"])
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(Path(__file__).parents[2]))
    status, _, err = shardproof("run", CASE, "--subject", f"{TOY}wrong")
    (line,) = [line for line in err.splitlines() if line.startswith("::error")]
    assert status == 1 and line.startswith("::error file=tests/harness/toy_subjects.py,line=")
    assert "%0Awhere:  mode=tp" in line and "%0Arepeat: " in line
    status, out, err = shardproof("compare", *sides)
    (line,) = [line for line in err.splitlines() if line.startswith("::error")]
    assert status == 1 and "::tp: new all_gather in backward of layers.1: 6 calls, 3 KiB more on a rank%0A" in line
    assert "::error" not in out
    assert "::error" not in shardproof("compare", sides[0], sides[0])[2]
