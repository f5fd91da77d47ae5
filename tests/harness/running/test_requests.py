"""Requests: one message for every wrong one; the cases that run by default, and the bugs they kill.

A variant is shown, and its cause named; a case that loads what another one saves follows it.
"""

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.harness.running.request import loading_what_exists
from shardproof.harness.running.sharing import arrange_cases, together
from shardproof.harness.subject import resolve_subject
from shardproof.reference.case import Case
from shardproof.reference.case.default_cases import default_cases
from shardproof.reference.language.core import MODES
from shardproof.reports.commands import cli
from shardproof.reports.options import request as request_command
from shardproof.reports.stored import frames
from shardproof.suites.mutants.catalogue import HELD_BACK, MUTANTS, of_file
from tests.harness.command_line import ONE, TOY, CommandLine
from tests.harness.toy_subjects import Stating

ahead = Stating(modes=("ep", "tp", "cp"), refuses=lambda case: "never")
"""Claims modes that the words of a case lack, and refuses every case."""


# Wrong requests: one message that names key, value, rule and something legal; more are in `test_refused_at_once`
def test_data_that_cannot_be_read_are_a_wrong_request(shardproof: CommandLine, tmp_path: Path) -> None:
    contents = {"empty": b"", "binary": b"\xff\xfe{}\n", "a space": b"words", "missing": None}
    for name, content in contents.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        message = shardproof.refused("run", ONE, "--data", str(tmp_path / name), "--subject", f"{TOY}right")
        assert f"data={tmp_path / name}" in message and "legal:" in message
    assert shardproof.refused("run", f"{ONE} data={tmp_path}/nowhere.txt").count("nowhere.txt") >= 1
    assert not Path("runs").exists(), "before anything runs"


PROFILED = ("run", f"{ONE} steps=4", "--profile", "torch", "--profile-steps", "3:3")
EMPTY = "='': is empty; legal: a word, or leave it out"
NO_CUDA = "device=cuda: this machine offers no CUDA device; legal: --device cpu"
HAS_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "required: COMMAND"),
        (("run", "--profile", "torch,vtune"), "profile=vtune: is not a profiler of cases; legal: torch,nsys"),
        (("run", "--profile", "nsys", "--engine", "dry"), "profile: dry ranks have shapes and no times"),
        (("run", "--profile", ","), "profile=,: names no witness; legal: torch,nsys"),
        (PROFILED, "profile-steps=3:3: holds no step, for END is not included; legal: 0:4"),
        (("show", "a", "b"), "unrecognized arguments: b"),
        pytest.param(("run", "--device", "cuda"), NO_CUDA, marks=HAS_CUDA),
        (("run", "--modes", "tp", "--variant", "flat-dim1"), "variant=flat-dim1: no default case of these modes can"),
        (("run", ONE, " "), f"case{EMPTY}"),
        (("run", "--profile", ""), f"profile{EMPTY}"),
        (("run", "--out", ""), f"out{EMPTY}"),
        (("show", ""), f"run{EMPTY}"),
        (("page", "-o", ""), f"-o{EMPTY}"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_exist_is_refused_with_what_does(
    shardproof: CommandLine, words: tuple[str, ...], said: str
) -> None:
    assert said in shardproof.refused(*words)
    assert not Path("runs").exists(), "before anything runs"


def test_a_script_that_cannot_be_written_is_refused_before_anything_runs(
    shardproof: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for file in (".", "nowhere/repro.py", "file/repro.py", "x" * 300, "pipe"):
        message = shardproof.refused("run", ONE, "--subject", f"{TOY}wrong", "--emit-repro", file)
        assert f"emit-repro={file}: cannot be written (" in message
    assert not Path("runs").exists()


# Without a case


def test_without_a_case_every_claimed_mode_runs_on_two_and_four_ranks() -> None:
    cases: Any = request_command.default_cases(resolve_subject(f"{TOY}right"), "all")
    by_mode = {mode: {case.world_size for case in cases if case.mode == mode} for mode in MODES}
    assert by_mode == dict.fromkeys(MODES, {2, 4})
    assert all(case.data == "" for case in cases), "real text: the sources of Python"
    assert {case.optimizer for case in cases} == {"sgd"}, "plain words, for it has no refuses"
    ours: Any = request_command.default_cases(resolve_subject("shardproof.parallel.subject:subject"), "tp")
    assert {case.optimizer for case in ours} == {"sgd", "adamw"}
    deep = request_command.default_cases(resolve_subject(f"{TOY}right"), "tp", deep=True)
    assert {case.world_size for case in deep} >= {2, 4, 8}


def test_a_claimed_mode_that_no_case_can_have_is_left_out_and_named(
    shardproof: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tests.harness.running.test_requests:ahead"
    found: Any = request_command.default_cases(resolve_subject(name), "all")
    assert {case.mode for case in found} == {"tp"}
    monkeypatch.setattr(request_command, "default_cases", lambda *_, **__: found[:1])
    status, _, err = shardproof("run", "--subject", name, "--engine", "dry")
    assert status == 2, "it takes no case"
    assert f"note: {name} claims ep, cp, which no case can have: left out\n" in err


@pytest.mark.parametrize(("options", "saves"), [(("--out", "a b"), 0), (("--engine", "dry"), 0), ((), 12)])
def test_default_cases_save_where_a_case_can_name_the_folder_and_ranks_have_numbers(
    options: tuple[str, ...], saves: int
) -> None:
    request = request_command.build_request(cli._build_parser().parse_args(["run", *options]))
    assert sum(bool(getattr(case, "save", "")) for case in request.cases) == saves


@pytest.mark.parametrize(
    ("words", "every"),
    [
        ((), 3),
        pytest.param(("--deep",), 1, marks=pytest.mark.deep("four CPU seconds")),
        (("tp=1", "tp=2"), 1),
        (("--subject", f"{TOY}right"), 1),
    ],
)
def test_of_our_own_subject_every_third_default_case_is_run_twice(words: tuple[str, ...], every: int) -> None:
    request = request_command.build_request(cli._build_parser().parse_args(["run", *words]))
    assert [request.repeats(case) for case in request.cases] == [n % every == 0 for n in range(len(request.cases))]


KNOWN = {mutant.name: mutant for mutant in (*MUTANTS, *HELD_BACK, *of_file("tests/one_word"))}


def test_every_known_mutant_finds_a_default_case_that_can_show_it() -> None:
    cases = default_cases()
    assert [name for name, mutant in KNOWN.items() if not any(map(mutant.shows, cases))] == []


SMALL = "family=internlm2 vocab=264 layers=1 steps=1 micro=1 seq=8 heads=4 kv_heads=2 hidden=16 ffn=32 tp=2"


def test_default_cases_are_made_to_show_it_and_fail_with_its_cause(
    shardproof_here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first case of each mode; modes without the deviation are left out, the words it needs are set."""
    cases = tuple(f"mode={mode} {SMALL} seed={seed}" for mode in ("tp", "msp", "isp") for seed in (0, 1))
    monkeypatch.setattr(request_command, "default_cases", lambda *_, **__: tuple(map(Case.parse, cases)))
    status, out, _ = shardproof_here("run", "--variant", "flat-dim1", "--modes", "tp,msp,isp")
    assert status == 1
    (text,) = frames.load("runs/latest").cases["case"]
    case = Case.parse(text)
    assert (case.mode, case.variant, case.packed, case.embedding) == ("msp", "flat-dim1", False, "hidden")
    assert "along dim 1 (tp)" in out


def test_a_case_that_is_given_keeps_its_words(shardproof_here: CommandLine) -> None:
    status, out, _ = shardproof_here("run", f"mode=msp {SMALL} seed=4", "--variant", "norm-average")
    assert status == 1
    (text,) = frames.load("runs/latest").cases["case"]
    assert Case.parse(text) == Case.parse(f"mode=msp {SMALL} seed=4 variant=norm-average")
    with Path("runs/latest/errors.csv").open(newline="") as file:
        *tensors, first = csv.DictReader(file)
    wrong = [row["name"] for row in tensors if float(row["error"]) > float(row["allowed"])]
    assert wrong[0] == "grad/final_norm.weight", "in the order of backward"
    assert f"first:  {first['phase']} of {first['region']}: {wrong[0]}" in out


SAVES = Case.parse("tp=2 layers=1 micro=3 steps=1 optimizer=adamw save=ck")
LOADS = Case.parse("tp=2 dp=2 layers=1 micro=3 steps=1 optimizer=adamw load=ck")
OTHERS = [Case.parse(f"tp=2 layers=1 micro=3 steps=1 seed={seed}") for seed in (1, 2, 3)]


def test_it_is_in_the_group_of_the_case_that_saves() -> None:
    cases = [OTHERS[0], SAVES, OTHERS[1], LOADS, OTHERS[2]]
    assert together(cases) == [[0], [1, 3], [2], [4]]
    assert together([LOADS, SAVES]) == [[0], [1]], "what it loads is there before the run"
    assert loading_what_exists(cases) == [OTHERS[0], SAVES, OTHERS[1], OTHERS[2]]


def test_the_order_of_a_default_run_keeps_it_behind() -> None:
    found = arrange_cases([LOADS.but(load="elsewhere"), *OTHERS, SAVES, LOADS])
    assert found.index(LOADS) == found.index(SAVES) + 1


def test_a_run_saves_and_loads_in_one_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes, folder = "hidden=16 heads=4 kv_heads=4 ffn=28 vocab=268 seq=8 batch=3", tmp_path / "ck"
    texts = [f"{sizes} {case}".replace("=ck", f"={folder}") for case in (SAVES, LOADS)]
    assert cli.main(["run", *texts, "--out", str(tmp_path / "runs")]) == 0
    assert "2 cases: 2 pass" in capsys.readouterr().out
