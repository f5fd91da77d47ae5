"""The example notebook runs from its first cell to its last on a stored run, and `shardproof` is all it imports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardproof
from tests import ROOT
from tests.reports import sample_run

NOTEBOOK = ROOT / "docs" / "a_run_as_frames.ipynb"


def cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_run.write(tmp_path / "runs" / "latest", failing=True)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells()):
        exec(compile(cell, f"{NOTEBOOK.name}, cell {number}", "exec"), names)  # our own text
    assert names["by_place"]["payload_bytes"].sum().sum() == 14 * sample_run.ACTIVATION_BYTES
    assert list(names["lines"]["verdict"]) == ["fail", "pass"]


def test_a_notebook_without_outputs_leaves_no_diff() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert all(cell.get("outputs", []) == [] for cell in notebook["cells"])


def test_load_gives_tidy_frames(tmp_path: Path) -> None:
    run = shardproof.load(sample_run.write(tmp_path / "run"))
    for frame in (run.events, run.summary, run.verdicts, run.timings):
        assert frame["mode"].cat.ordered and list(frame["mode"].cat.categories[:2]) == ["tp", "tp-sp"]
    for name in run.events.columns.union(run.summary.columns):
        if any(word in name for word in ("payload", "wire", "duration", "start")):
            assert name.endswith(("_bytes", "_us")), "units are in the names"
