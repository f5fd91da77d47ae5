"""A case that loads what another one saves is proved behind it, by the same process, in every order of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.running.request import unsaved
from harness.running.sharing import arranged, together
from reference.case import Case
from reports.commands import cli

SAVES = Case.parse("tp=2 layers=1 micro=3 steps=1 optimizer=adamw save=ck")
LOADS = Case.parse("tp=2 dp=2 layers=1 micro=3 steps=1 optimizer=adamw load=ck")
OTHERS = [Case.parse(f"tp=2 layers=1 micro=3 steps=1 seed={seed}") for seed in (1, 2, 3)]


def test_it_is_in_the_group_of_the_case_that_saves() -> None:
    cases = [OTHERS[0], SAVES, OTHERS[1], LOADS, OTHERS[2]]
    assert together(cases) == [[0], [1, 3], [2], [4]]
    assert together([LOADS, SAVES]) == [[0], [1]], "what it loads is there before the run"
    assert unsaved(cases) == [OTHERS[0], SAVES, OTHERS[1], OTHERS[2]]


def test_the_order_of_a_default_run_keeps_it_behind() -> None:
    found = arranged([LOADS.but(load="elsewhere"), *OTHERS, SAVES, LOADS])
    assert found.index(LOADS) == found.index(SAVES) + 1


def test_a_run_saves_and_loads_in_one_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes, folder = "hidden=16 heads=4 kv_heads=4 ffn=28 vocab=268 seq=8 batch=3", tmp_path / "ck"
    texts = [f"{sizes} {case}".replace("=ck", f"={folder}") for case in (SAVES, LOADS)]
    assert cli.main(["run", *texts, "--out", str(tmp_path / "runs")]) == 0
    assert "2 cases: 2 pass" in capsys.readouterr().out
