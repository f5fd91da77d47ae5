"""`shardproof run --variant NAME`: the cases that can show it, the failure that names its cause, wrong requests."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from harness.engines.named import ENGINES
from reference.case import Case
from reports.options import request as request_command
from reports.stored import frames
from tests.harness.command_line import CommandLine, command_line
from tests.reports.pages.map_figures import map_flaws

SMALL = "family=internlm2 vocab=264 layers=1 steps=1 micro=1 seq=8 heads=4 kv_heads=2 hidden=16 ffn=32 tp=2"


@pytest.fixture
def shardproof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The real engine: it takes two ranks to show a deviation."""
    engine = ENGINES["inproc"]
    line = command_line(tmp_path, monkeypatch, capsys)
    monkeypatch.setitem(ENGINES, "inproc", engine)
    return line


def test_default_cases_are_made_to_show_it_and_fail_with_its_cause(
    shardproof: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first case of each mode; modes without the deviation are left out, the words it needs are set."""
    cases = tuple(f"mode={mode} {SMALL} seed={seed}" for mode in ("tp", "msp", "isp") for seed in (0, 1))
    monkeypatch.setattr(request_command, "default_cases", lambda *_, **__: tuple(map(Case.parse, cases)))
    status, out, _ = shardproof("run", "--variant", "flat-dim1", "--modes", "tp,msp,isp")
    assert status == 1
    (text,) = frames.load("runs/latest").cases["case"]
    case = Case.parse(text)
    assert (case.mode, case.variant, case.packed, case.embedding) == ("msp", "flat-dim1", False, "hidden")
    assert "a collective over tp along dim 1 that works along dim 0" in out


def test_a_case_that_is_given_keeps_its_words(shardproof: CommandLine) -> None:
    status, out, _ = shardproof("run", f"mode=msp {SMALL} seed=4", "--variant", "norm-average")
    assert status == 1
    (text,) = frames.load("runs/latest").cases["case"]
    assert Case.parse(text) == Case.parse(f"mode=msp {SMALL} seed=4 variant=norm-average")
    page = Path("runs/latest/report.html").read_text()
    cells, flaws = map_flaws(page, Path("runs/latest"))
    assert cells and flaws == [] and page.count(" first</td>") == page.count('class="map"') == 1
    with Path("runs/latest/errors.csv").open(newline="") as file:
        *tensors, first = csv.DictReader(file)
    wrong = [row["name"] for row in tensors if float(row["error"]) > float(row["allowed"])]
    assert wrong == ["grad/final_norm.weight", *wrong[1:]], "in the order of backward"
    assert f"first:  {first['phase']} of {first['region']}: {wrong[0]}" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variant", "E7"], "variant=E7: is not a known variant; legal: norm-average"),
        (["mode=tp tp=2", "--variant", "flat-dim1"], "is a deviation of mode=msp|fsp, not of mode=tp; legal: variant="),
        (["--modes", "tp", "--variant", "flat-dim1"], "variant=flat-dim1: no default case of these modes can show it"),
    ],
)
def test_what_cannot_be_shown_is_a_wrong_request(shardproof: CommandLine, words: list[str], message: str) -> None:
    status, _, err = shardproof("run", *words)
    assert status == 2
    assert message in err
    assert not Path("runs").exists()
