"""Requests: one message for every wrong one; the cases that run by default, and the bugs they kill."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.subject import named
from reference.case.default_cases import default_cases
from reference.language.modes import MODES
from reports.commands import cli
from reports.options import request as request_command
from suites.mutants.catalogue import HELD_BACK, MUTANTS, of_file
from tests.harness.command_line import ONE, TOY, CommandLine


def ahead(case: object, device: object) -> dict[str, Any]:
    """Claims modes that the words of a case lack, and refuses every case."""
    return {}


ahead.modes = ("ep", "tp", "cp")  # type: ignore[attr-defined]
ahead.refuses = lambda case: "never"  # type: ignore[attr-defined]


# Wrong requests: one message that names key, value, rule and something legal
PROFILED = ("run", f"{ONE} steps=4", "--profile", "torch", "--profile-steps")


def test_data_that_cannot_be_read_are_a_wrong_request(shardproof: CommandLine, tmp_path: Path) -> None:
    contents = {"empty": b"", "binary": b"\xff\xfe{}\n", "a space": b"words", "missing": None}
    for name, content in contents.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        message = shardproof.refused("run", ONE, "--data", str(tmp_path / name), "--subject", f"{TOY}right")
        assert f"data={tmp_path / name}" in message and "legal:" in message
    assert shardproof.refused("run", f"{ONE} data={tmp_path}/nowhere.txt").count("nowhere.txt") >= 1
    assert not Path("runs").exists(), "before anything runs"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "required: COMMAND"),
        (("explain", "a", "b"), "invalid choice: 'explain' (choose from"),
        (("run", "--engine", "steam"), "invalid choice: 'steam' (choose from"),
        (("run", "--profile", "torch,vtune"), "profile=vtune: is not a witness; legal: torch,nsys"),
        (("run", "--profile", "nsys", "--engine", "dry"), "profile: dry ranks have shapes and no times"),
        (("run", ONE, "--profile-steps", "0:1"), "profile-steps=0:1: chooses among the steps that --profile watches"),
        (("run", ONE, "--profile", "nsys", "--profile-steps", "1"), "profile-steps=1: must be FIRST:END, steps from"),
        (("run", "--profile", ","), "profile=,: names no witness; legal: torch,nsys"),
        ((*PROFILED, "3:3"), "profile-steps=3:3: holds no step, for END is not included; legal: 0:4"),
        (("run", f"{ONE} steps=3", *PROFILED[1:], "2:4"), "has 3 steps, counted from 0; legal: 0:3"),
        (("run", "--preset-experiment", "gpt5"), "preset-experiment=gpt5: is not known; legal: gpt3-857m-tp4"),
        (("run", "--mode", "tp"), "unrecognized arguments: --mode"),
        (("show", "a", "b"), "unrecognized arguments: b"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_exist_is_refused_with_what_does(
    shardproof: CommandLine, words: tuple[str, ...], said: str
) -> None:
    assert said in shardproof.refused(*words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_here_is_refused(shardproof: CommandLine) -> None:
    said = "device=cuda: this machine offers no CUDA device; legal: --device cpu"
    assert said in shardproof.refused("run", "--device", "cuda")


def test_a_script_that_cannot_be_written_is_refused_before_anything_runs(
    shardproof: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for file in (".", "nowhere/repro.py", "file/repro.py", "x" * 300, "pipe"):
        message = shardproof.refused("run", ONE, "--subject", f"{TOY}wrong", "--emit-repro", file)
        assert f"emit-repro={file}: cannot be written (" in message
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("run", ONE, " "), "case"),
        (("run", "--profile", ""), "profile"),
        (("run", "--out", ""), "out"),
        (("show", ""), "run"),
        (("page", "-o", ""), "-o"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_empty_word_chooses_nothing(shardproof: CommandLine, words: tuple[str, ...], name: str) -> None:
    assert f"{name}='': is empty; legal: a word, or leave it out" in shardproof.refused(*words)
    assert not Path("runs").exists()


# Without a case


def test_without_a_case_every_claimed_mode_runs_on_two_and_four_ranks() -> None:
    cases: Any = request_command.default_cases(named(f"{TOY}right"), "all")
    by_mode = {mode: {case.world_size for case in cases if case.mode == mode} for mode in MODES}
    assert by_mode == dict.fromkeys(MODES, {2, 4})
    assert all(case.data == "" for case in cases), "real text: the sources of Python"
    assert {case.optimizer for case in cases} == {"sgd"}, "plain words, for it has no refuses"
    ours: Any = request_command.default_cases(named("parallel.subject:subject"), "tp")
    assert {case.optimizer for case in ours} == {"sgd", "adamw"}
    deep = request_command.default_cases(named(f"{TOY}right"), "tp", deep=True)
    assert {case.world_size for case in deep} >= {2, 4, 8}


def test_a_claimed_mode_that_no_case_can_have_is_left_out_and_named(
    shardproof: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tests.harness.running.test_requests:ahead"
    found: Any = request_command.default_cases(named(name), "all")
    assert {case.mode for case in found} == {"tp"}
    monkeypatch.setattr(request_command, "default_cases", lambda *_, **__: found[:1])
    status, _, err = shardproof("run", "--subject", name, "--engine", "dry")
    assert status == 2, "it takes no case"
    assert f"note: {name} claims ep, cp, which no case can have: left out\n" in err


@pytest.mark.parametrize(("options", "saves"), [(("--out", "a b"), 0), (("--engine", "dry"), 0), ((), 1)])
def test_default_cases_save_where_a_case_can_name_the_folder_and_ranks_have_numbers(
    options: tuple[str, ...], saves: int
) -> None:
    request = request_command.requested(cli._parser().parse_args(["run", *options]))
    assert sum(bool(getattr(case, "save", "")) for case in request.cases) == saves


KNOWN = {mutant.name: mutant for mutant in (*MUTANTS, *HELD_BACK, *of_file("tests/one_word"))}


def test_every_known_mutant_finds_a_default_case_that_can_show_it() -> None:
    cases = default_cases()
    assert [name for name, mutant in KNOWN.items() if not any(map(mutant.shows, cases))] == []
