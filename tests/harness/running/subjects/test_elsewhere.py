"""Subjects that go to another folder, or spoil what is written after the run: the verdicts stay where they belong."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.errors import RankDied
from reference.case import Case
from reports.stored import frames
from tests.harness.command_line import ONE, CommandLine
from tests.harness.toy_subjects import wrong

ME = "tests.harness.running.subjects.test_elsewhere:"


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
    (tmp_path / "my_roaming_subject.py").write_text(
        "import os\nfrom tests.harness.toy_subjects import right as subject\nos.chdir('/')\n"
    )
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

    monkeypatch.setattr("harness.reproducing.repro.emit", dying)
    status, out, _ = shardproof(*words, "--json")
    assert status == 1 and "rank 0 ended with status 9" in json.loads(out)["notes"]
    Path("repro.py").rmdir()
    monkeypatch.setattr("harness.reproducing.repro.emit", lambda *_: 1 / 0)
    status, out, _ = shardproof(*words)
    assert status == 1 and "note: repro.py was not written: ZeroDivisionError: division by zero\n" in out
