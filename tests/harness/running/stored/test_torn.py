"""A run that was killed while it wrote the verdicts of a case: what is left of them never reads as a pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.checking.evidence import Verdict
from harness.running.store import Store
from reports.commands.cli import main
from reports.stored.frames import load
from reports.stored.summary import headline

FIRST, SECOND = "mode=tp tp=2", "mode=tp tp=4"
CHECKS = ("forward", "replicas", "update")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two cases of three verdicts each; the last one of each fails."""
    store = Store(tmp_path, "my_pkg.tp:subject", {"versions": {}})
    store.plan({"case": case, "mode": "tp", "world_size": 2} for case in (FIRST, SECOND))
    for case in (FIRST, SECOND):
        words = zip(CHECKS, ("pass", "pass", "fail"), strict=True)
        verdicts = [
            Verdict(case=case, check=check, verdict=word, worst=None, message=f"m {check}") for check, word in words
        ]
        store.add(case, "", (), verdicts, {"truth": 0.5})
    store.close()
    return store.path


def verdicts(folder: Path) -> list[str]:
    return list(headline(load(folder))["verdict"])


def test_a_whole_run_is_told_as_it_is(folder: Path) -> None:
    run = load(folder)
    assert run.notes == () and len(run.verdicts) == 6
    assert verdicts(folder) == ["fail", "fail"]


def test_wherever_the_verdicts_are_cut_no_case_reads_as_a_pass(folder: Path) -> None:
    path = folder / "verdicts.jsonl"
    data = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == ord("\n")]
    for place in sorted({*ends, *(end - 1 for end in ends), *(end + 1 for end in ends[:-1]), *range(0, len(data), 37)}):
        path.write_bytes(data[:place])
        whole = sum(end <= place for end in ends)
        first, second = "fail" if whole >= 3 else "unknown", "fail" if whole >= 6 else "unknown"
        assert verdicts(folder) == [first, second], place


def test_a_cut_between_two_lines_of_a_case_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "verdicts.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    assert main(["show", str(folder)]) == 0
    told = capsys.readouterr().out
    assert f"unknown (run): {SECOND}\n2 of its 3 verdicts are stored: the run was stopped while they were writ" in told
    assert "note: verdicts.jsonl lacks verdicts of 1 of the cases in it: the run was stopped\n" in told


def test_a_folder_of_an_older_release_is_read_as_far_as_it_can_be_known(folder: Path) -> None:
    path = folder / "verdicts.jsonl"
    old = [
        {key: value for key, value in json.loads(line).items() if key != "of"} for line in path.read_text().splitlines()
    ]
    text = "".join(json.dumps(line) + "\n" for line in old)
    path.write_text(text)
    assert load(folder).notes == () and verdicts(folder) == ["fail", "fail"]
    path.write_text(text[:-20])
    assert verdicts(folder) == ["fail", "unknown"], "the line that was cut was one of the last case"
