"""`python -m bench.systems`: rows and page agree, and what is not as its row has it fails."""

import re
from pathlib import Path
from typing import Any

import pytest

from bench.systems import (
    CANNOT,
    CHECKS,
    DEFECT,
    FAILED,
    PAGE,
    PASSED,
    Cell,
    System,
    find_python,
    judge_cell,
    key,
    read_cells,
    stored_on,
)
from tests import ROOT

CELLS = list(read_cells())


def test_the_page_has_every_cell_with_its_result_and_no_other() -> None:
    row = r"^\|[^|]*\| `(\w+)` \| `([^`]+)` \| (\w+) \| (pass|known defect|cannot run|FAIL)\b"
    assert re.findall(row, PAGE.read_text("utf-8"), re.MULTILINE) == [(*key(cell)[1:], cell.expected) for cell in CELLS]
    assert stored_on(PAGE).keys() == {key(cell) for cell in CELLS if cell.expected == PASSED and cell.kept}


def test_a_file_of_a_system_is_a_short_tutorial_and_every_one_is_in_the_matrix() -> None:
    folder = ROOT / "suites" / "subjects"
    for cell in CELLS:
        assert (folder / f"{cell.subject}.py").read_text("utf-8").count("\n") < 120
    parts = {
        "__init__",
        "mcore_parts",
        "mcore_training",
        "checkout",
        "regions",
        "muon_shares",
        "one_byte",
        "torchtitan_parts",
    }
    shown_elsewhere = {"mlp", "dropout", "megatron", "qwen3", "torchtitan_recipe"}
    assert {path.stem for path in folder.glob("*.py")} - parts - shown_elsewhere == {cell.subject for cell in CELLS}


OWN = Cell(System("system", ("torch",)), "ddp", "feature", "dp=3")
WRONG = OWN._replace(expected=DEFECT, needle="mlp.router", finding="halved")
RAISES = OWN._replace(expected=CANNOT, needle="required CUDA")
ALL = {check: (PASSED, "") for check in CHECKS}
ROW = {"verdict": PASSED, "forward_calls": 2, "backward_calls": 3, "payload_bytes": 40}
BAD = {"forward": ("fail", "loss/0 differs, first in mlp.router")}
ENDS = {"run": ("fail", "rank 1 of 3 raised TypeError: it required CUDA 11, at f.py:1")}


@pytest.mark.parametrize(
    ("cell", "verdict", "checks", "stored", "result", "why"),
    [
        (OWN, PASSED, ALL, None, PASSED, ""),
        (OWN, PASSED, ALL, (5, 40), PASSED, ""),
        (OWN, PASSED, ALL, (5, 44), FAILED, "calls and bytes are (5, 40), and on the page (5, 44)"),
        (OWN, PASSED, {**ALL, "update": ("unknown", "")}, None, FAILED, "not compared: update"),
        (OWN, "fail", {**ALL, **BAD}, None, FAILED, "loss/0 differs"),
        (OWN, "skip", {}, None, FAILED, "the verdict is skip"),
        (WRONG, "fail", {**ALL, **BAD}, None, DEFECT, "halved"),
        (WRONG._replace(needle="mlp.experts"), "fail", {**ALL, **BAD}, None, FAILED, "the verdict is fail"),
        (WRONG, PASSED, ALL, None, FAILED, "the verdict is pass"),
        (RAISES, "fail", ENDS, None, CANNOT, "TypeError: it required CUDA 11"),
        (RAISES, "fail", BAD, None, FAILED, "the verdict is fail"),
        (RAISES, "unknown", ENDS, None, FAILED, "the verdict is unknown"),
    ],
)
def test_a_result_other_than_that_of_the_row_is_a_failure(
    cell: Cell, verdict: str, checks: dict[str, tuple[str, str]], stored: Any, result: str, why: str
) -> None:
    verdicts = [
        {"check": check, "verdict": found, "facts": [{"id": "text", "values": {"text": text}}]}
        for check, (found, text) in checks.items()
    ]
    seen = judge_cell(cell, {**ROW, "verdict": verdict}, verdicts, stored)
    assert seen.result == result and why in seen.why


def test_a_python_that_is_installed_beside_this_one_is_found_and_a_shim_of_no_chosen_version_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, status in (("shims", 127), ("versions/3.98.1/bin", 0)):
        program = tmp_path / place / "python3.98"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\nexit {status}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert find_python("python3.98") == str(tmp_path / "versions/3.98.1/bin/python3.98")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "versions"))
    assert find_python("python3.98") == str(tmp_path / "versions/3.98.1/bin/python3.98")
    assert find_python("python3.99") == ""
