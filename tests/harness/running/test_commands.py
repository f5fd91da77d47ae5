"""The command `run`: a case that loads what another one saves follows it; a variant is shown, and its cause named."""

import csv
from pathlib import Path

import pytest

from harness.running.engines import ENGINES
from harness.running.request import loading_what_exists
from harness.running.sharing import arranged, together
from reference.case import Case
from reports.commands import cli
from reports.options import request as request_command
from reports.stored import frames
from tests.harness.command_line import CommandLine, command_line

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
    with Path("runs/latest/errors.csv").open(newline="") as file:
        *tensors, first = csv.DictReader(file)
    wrong = [row["name"] for row in tensors if float(row["error"]) > float(row["allowed"])]
    assert wrong[0] == "grad/final_norm.weight", "in the order of backward"
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


SAVES = Case.parse("tp=2 layers=1 micro=3 steps=1 optimizer=adamw save=ck")
LOADS = Case.parse("tp=2 dp=2 layers=1 micro=3 steps=1 optimizer=adamw load=ck")
OTHERS = [Case.parse(f"tp=2 layers=1 micro=3 steps=1 seed={seed}") for seed in (1, 2, 3)]


def test_it_is_in_the_group_of_the_case_that_saves() -> None:
    cases = [OTHERS[0], SAVES, OTHERS[1], LOADS, OTHERS[2]]
    assert together(cases) == [[0], [1, 3], [2], [4]]
    assert together([LOADS, SAVES]) == [[0], [1]], "what it loads is there before the run"
    assert loading_what_exists(cases) == [OTHERS[0], SAVES, OTHERS[1], OTHERS[2]]


def test_the_order_of_a_default_run_keeps_it_behind() -> None:
    found = arranged([LOADS.but(load="elsewhere"), *OTHERS, SAVES, LOADS])
    assert found.index(LOADS) == found.index(SAVES) + 1


def test_a_run_saves_and_loads_in_one_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes, folder = "hidden=16 heads=4 kv_heads=4 ffn=28 vocab=268 seq=8 batch=3", tmp_path / "ck"
    texts = [f"{sizes} {case}".replace("=ck", f"={folder}") for case in (SAVES, LOADS)]
    assert cli.main(["run", *texts, "--out", str(tmp_path / "runs")]) == 0
    assert "2 cases: 2 pass" in capsys.readouterr().out
