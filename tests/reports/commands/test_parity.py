"""`shardproof parity` and `compare --values`: two launches of a script as it is, and launches that come to no end."""

import json
import sys
import time
from pathlib import Path

import pytest

from shardproof.harness.parity.launching import OUTPUT, LaunchRecorder, is_recorded
from shardproof.harness.parity.recorded import Launch, read_launch
from shardproof.harness.programs.session import ValueOptions
from shardproof.reports.commands import cli
from shardproof.reports.stored.frames import load
from tests import ROOT
from tests.harness.parity.toy_launches import Toy

pytest.importorskip("safetensors", reason="needs safetensors")

SCRIPT = ROOT / "tests" / "harness" / "parity" / "train_gpt.py"
LIMIT_S = 240.0


def words_of(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def trained(*words: str, ranks: int = 1) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*(torchrun if ranks > 1 else [sys.executable]), str(SCRIPT), *words]


@pytest.mark.slow
def test_a_script_is_held_against_itself_on_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ["--dtype", "float64", "--timeout", str(LIMIT_S)]
    assert cli.main(["parity", *options, "--", *trained(), "--", *trained("--mode", "ddp", ranks=2)]) == 0
    assert "1 case: 1 pass" in capsys.readouterr().out
    run = load("runs/latest")
    first = Path("runs/latest/first").resolve()
    assert {*run.cases["mode"]} == {"dp"} and run.notes == () and (run.path / "report.html").is_file()
    assert {path.name for path in run.path.iterdir() if path.is_dir()} == {"first", "second"}

    values = ValueOptions(dtype="float64")
    recorder = LaunchRecorder(folder=tmp_path / "edited", steps=2, timeout_s=LIMIT_S, values=values)
    edited = recorder.record("second", trained("--mode", "ddp", "--edit", "loss_count", ranks=2))
    assert cli.main(["compare", "runs/latest/first", str(edited.folder), "--values"]) == 1
    told = capsys.readouterr().out
    assert "first:  loss in step 0: loss/0" in told and "is 1 / the size of dp" in told
    assert f"repeat: shardproof compare {first} {edited.folder} --values" in told


def test_every_further_launch_begins_with_the_initial_weights_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = {}

    def record(self: LaunchRecorder, name: str, command: list[str], *, same_init: str = "", perturb: int = 0) -> Launch:
        begun[name] = same_init
        edits = {"loss": lambda loss, data, counted: loss * (1 + 1e-7)} if name == "second" else {}
        seed = 0 if same_init or name == "first" else 1 + len(begun)
        return read_launch(Toy(edits=edits, seed=seed).launch(self.folder / name))

    monkeypatch.setattr(LaunchRecorder, "record", record)
    words = ["parity", "--same-init", "--out", str(tmp_path), "--", *words_of("pass"), "--", *words_of("pass")]
    assert cli.main(words) == 1
    first = next(tmp_path.glob("*parity/first")).resolve()
    assert begun.pop("first") == "" and {"second", "again", "perturbed-1"} <= {*begun}
    assert {*begun.values()} == {str(first)}


@pytest.mark.parametrize(
    "words, told",
    [
        (["--", "true"], "takes two commands"),
        (["--", "true", "--"], "takes two commands"),
        (["--", "true", "--", "true", "--", "true"], "takes two commands"),
        (["true", "--", "true"], "stands behind a -- of its own"),
        (["--", "no-such-command", "--", "true"], "no-such-command: is not on PATH"),
        (["--steps", "0", "--", "true", "--", "true"], "steps=0: must be the number of steps"),
        (["--steps", "\N{SUPERSCRIPT TWO}", "--", "true", "--", "true"], "must be the number of steps"),
        (["--dtype", "float16", "--", "true", "--", "true"], "dtype=float16: must be float64"),
        (["--timeout", "0", "--", "true", "--", "true"], "timeout=0"),
    ],
)
def test_wrong_words_are_one_message(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["parity", *words]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_folders_without_values_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(tmp_path), str(tmp_path), "--values"]) == 2
    assert "holds no values; legal: a folder of `shardproof record --values`" in capsys.readouterr().err
    (tmp_path / "values").mkdir()
    assert cli.main(["compare", str(tmp_path), "--values"]) == 2
    assert "two folders are compared" in capsys.readouterr().err
    assert cli.main(["compare", str(tmp_path), str(tmp_path), "--control", str(tmp_path)]) == 2
    assert "is about values" in capsys.readouterr().err


ENDS = {
    "fails": ("print('it broke'); raise SystemExit(3)", 2, "ended with exit status 3 before its first step"),
    "fails below torchrun": (
        "print('it broke'); print('E1129 torch/distributed/elastic/multiprocessing/api.py:869] failed'); "
        "[print('=====') for _ in range(20)]; raise SystemExit(1)",
        2,
        "ended with exit status 1 before its first step",
    ),
    "is killed": ("print('it broke'); import os; os.kill(os.getpid(), 9)", 3, "was ended by signal 9"),
    "hangs": ("print('it broke', flush=True); import time; time.sleep(600)", 3, "did not record 2 steps in 2 seconds"),
    "trains nothing": ("print('it broke')", 2, "nothing was recorded"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_launch_without_its_steps_says_how_it_ended(
    end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, status, told = ENDS[end]
    started = time.monotonic()
    words = ["parity", "--timeout", "2", "--out", str(tmp_path), "--", *words_of(code), "--", *words_of("pass")]
    assert cli.main(words) == status
    error = capsys.readouterr().err
    assert "launch A (" in error and told in error and "its last lines:\n  it broke" in error
    assert time.monotonic() - started < 60


def test_a_launch_is_over_when_all_ranks_have_recorded_all_steps(tmp_path: Path) -> None:
    folder = tmp_path / "values"
    folder.mkdir()
    assert not is_recorded(tmp_path)
    (folder / "rank-0.json").write_text(json.dumps({"world_size": 2, "steps": [0, 1], "done": True}))
    assert not is_recorded(tmp_path)
    (folder / "rank-1.json").write_text("{")
    assert not is_recorded(tmp_path)
    (folder / "rank-1.json").write_text(json.dumps({"world_size": 2, "steps": [0, 1], "done": True}))
    assert is_recorded(tmp_path)
    assert OUTPUT == "output.txt"
