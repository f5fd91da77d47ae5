"""`make compat`: interpreters are found or named as missing, a failed step is told, and the table says what was run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import compat
from bench.compat import FAILED, MATRIX, NOT_RUN, PASSED, Row
from harness.torch_internals.lookup import TESTED
from tests import ROOT


def test_the_matrix_is_what_is_said_to_be_tested() -> None:
    releases = {tuple(map(int, torch.split(".")[:2])) for _, torch in MATRIX}
    assert (min(releases), max(releases)) == TESTED
    assert {python for python, _ in MATRIX} == {"3.11", "3.12", "3.13"}
    project = (ROOT / "pyproject.toml").read_text()
    assert '"torch>=2.11"' in project and all(f"Python :: {python}" in project for python, _ in MATRIX)
    text = (ROOT / "README.md").read_text()
    assert all(torch in text for _, torch in MATRIX) and "`make compat`" in text


@pytest.mark.parametrize(
    ("results", "status"), [((PASSED, PASSED), 0), ((PASSED, FAILED), 1), ((NOT_RUN,), 1), ((NOT_RUN, PASSED), 0)]
)
def test_a_failed_step_or_nothing_run_is_status_1_and_its_reason_stands_below_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], results: tuple[str, ...], status: int
) -> None:
    rows = [Row("3.12", "2.14.1", "run", result, 41.6, "" if result == PASSED else "it died") for result in results]
    monkeypatch.setattr(compat, "_rows", lambda *_, **__: rows)
    assert compat.main(["--only", "3.12:2.14"]) == status
    told = capsys.readouterr().out
    assert "3.12    2.14.1  run   " in told
    assert told.count("torch 2.14.1 run: it died") == sum(result != PASSED for result in results)
    assert compat.main(["--only", "2.7"]) == 2
    assert "legal: 3.12:2.11.0" in capsys.readouterr().err


def test_an_interpreter_that_is_not_here_is_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    path, why = compat.interpreter("3.99")
    assert path == "" and "no python3.99 on PATH" in why
    monkeypatch.setattr(compat, "interpreter", lambda version: ("", why))
    (told,) = compat._rows("3.99", "2.14.1", keep=False)
    assert (told.result, told.why) == (NOT_RUN, why)


def test_a_step_that_fails_or_does_not_end_says_so(tmp_path: Path) -> None:
    python = [sys.executable, "-c"]
    assert compat._ended([*python, "print(1)"], 60.0, tmp_path) == ""
    assert compat._ended([*python, "print('lost'); raise SystemExit(5)"], 60.0, tmp_path) == "exit status 5: lost"
    assert compat._ended(["sleep", "60"], 0.1, tmp_path).startswith("no end within 0 s")
