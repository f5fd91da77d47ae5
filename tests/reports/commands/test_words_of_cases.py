"""The words of a case on the command line: without quotes, in another order, too large, with a folder that is none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardproof
from tests.harness.command_line import ONE, TOY, CommandLine, command_line
from tests.reports import sample_run

NINES = "9" * 64
SUBJECT = f"{__name__}:own"


def own(case: Any, device: torch.device) -> Mapping[str, Any]:
    loss = torch.ones((), dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(loss)
    return {"loss/0": loss}


own.words, own.truth = {"width": 12, "act": ("gelu", "relu"), "big": False}, "alone"  # type: ignore[attr-defined]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return command_line(tmp_path, monkeypatch, capsys)


def test_words_without_quotes_are_cases_and_a_note_says_so(command: CommandLine) -> None:
    _, out, err = command("run", "tp=1", "steps=1", "--subject", SUBJECT)
    note = 'note: these words are 2 cases, one each; as one case: "tp=1 steps=1"\n'
    assert err.count(note) == 1 and "tp=1" in out and "steps=1" in out
    for words in (("tp=1", "tp=1 steps=1"), ("tp=1 steps=1",), ("steps=1", "steps=2")):
        assert "note: these words" not in command("run", *words, "--subject", SUBJECT)[2]
    assert note in command("faults", "tp=1", "steps=1", "--subject", SUBJECT)[2]
    assert note.replace("steps", "layers") in command("predict", "tp=1", "layers=1", "--cluster", "nowhere")[2]


def test_a_command_of_one_case_takes_words_without_quotes(command: CommandLine) -> None:
    quoted = command("names", "tp=2 layers=1")
    assert quoted[0] == 0 and command("names", "tp=2", "layers=1") == quoted


def test_expect_finds_a_case_in_own_words_however_it_is_written(tmp_path: Path, command: CommandLine) -> None:
    run = shardproof.run(["tp=2 steps=1", "tp=2 width=7 act=relu", "tp=2"], SUBJECT, out=tmp_path / "runs").path
    for words, case in {
        "steps=1 tp=2": "tp=2 steps=1",
        "tp=2 micro=2 dp=1 width=12 act=gelu big=false steps=01": "tp=2 steps=1",
        "act=relu width=7 seed=0 tp=2": "tp=2 width=7 act=relu",
        "tp=2 steps=2": "tp=2",
    }.items():
        status, out, _ = command("expect", str(run), *words.split())
        assert status == 0 and f'if str(case) != "{case}"' in out, words
    for words in ("tp=2 steps=1 big=true", "width=7 tp=2", "act=relu tp=2 width=8", "steps=1", "tp=2 depth=3"):
        assert "is not in run" in command.refused("expect", str(run), words)


def test_expect_finds_a_case_of_ours_however_it_is_written(tmp_path: Path, command: CommandLine) -> None:
    run = str(sample_run.write(tmp_path / "stored"))
    for words in ("seq=64 dp=1 mode=tp-sp", "preset=tiny-gpt mode=tp-sp tp=2 seq=64 layers=2"):
        status, out, _ = command("expect", run, words)
        assert status == 0 and 'if str(case) != "mode=tp-sp tp=2 seq=64"' in out
    assert command("expect", run, "tp=2")[0] == 0


@pytest.mark.parametrize("engine", ["inproc", "dry"])
@pytest.mark.parametrize("key", ["steps", "tp", "layers", "bucket", "seed", "recompute_layers"])
def test_a_whole_number_of_64_digits_is_refused(command: CommandLine, engine: str, key: str) -> None:
    message = command.refused("run", f"mode=tp {key}={NINES}", "--engine", engine)
    most = 2**64 - 1 if key == "seed" else 2**31 - 1
    assert f"{key}={NINES}: must be " in message and f"legal: {key}={most}" in message


@pytest.mark.parametrize("key", ["steps", "tp", "micro", "seed", "width"])
def test_a_whole_number_of_64_digits_is_refused_in_own_words(command: CommandLine, key: str) -> None:
    message = command.refused("run", f"{key}={NINES}", "--subject", SUBJECT)
    assert f"{key}={NINES}: must be at most " in message and f"legal: {key}=" in message


@pytest.mark.parametrize("name", ["hidden", "positions", "grain"])
def test_a_slice_has_bounds_too(command: CommandLine, name: str) -> None:
    assert f"={NINES}" in command.refused("slice", f"{name}={NINES}")


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("/dev/null", "it is a file"),
        ("/proc/x", "No such file or directory"),
        ("a.txt", "it is a file"),
        ("a.txt/b", ""),
    ],
)
def test_a_folder_that_cannot_be_written_is_a_wrong_request(
    command: CommandLine, tmp_path: Path, folder: str, reason: str
) -> None:
    (tmp_path / "a.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    start_s = time.monotonic()
    message = command.refused("run", f"{ONE} save={folder}", "--subject", f"{TOY}right")
    assert f"save={folder}: cannot be written ({reason}" in message
    assert "legal: a folder with write permission, such as save=checkpoint" in message
    assert sorted(tmp_path.rglob("*")) == before and time.monotonic() - start_s < 10


def test_a_folder_that_can_be_written_is_made_by_the_run_alone(command: CommandLine, tmp_path: Path) -> None:
    message = command.refused("run", f"{ONE} save=new/deep", f"{ONE} save=/dev/null", "--subject", f"{TOY}right")
    assert "save=/dev/null" in message and not (tmp_path / "new").exists()
