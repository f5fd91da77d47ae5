"""The doctor: what is there, what is not, and what follows; judged from facts, and once from this machine."""

import dataclasses
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardproof.reports.commands import cli, doctor
from shardproof.reports.commands.doctor import Machine
from tests import ROOT

FULL = Machine(
    python="3.12.1",
    torch="2.12.1+cu130",
    nvtx="0.2.17",
    nvtx_listener=True,
    backends=("gloo", "nccl"),
    gpus=("A big one", "A big one"),
    nsys="/usr/bin/nsys",
    peers={"transformers": "5.0", "megatron-core": "0.16", "deepspeed": "0.18"},
    checkouts=dict.fromkeys(doctor.CHECKOUTS, os.curdir),
    cores=8,
    torch_note="tested with 2.11 to 2.14",
)


def rows(machine: Machine) -> dict[str, tuple[str, str, str]]:
    """Subject of a row -> found, usable, what follows."""
    return {what: (found, usable, follows) for what, found, usable, follows in doctor.judge_machine(machine)[0]}


def test_a_machine_with_everything_misses_nothing() -> None:
    table = rows(FULL)
    assert {usable for _, usable, _ in table.values()} == {"yes"}
    assert table["GPU"][0] == "A big one, A big one"
    assert "a tool listens" in table["nvtx"][2]
    assert table["backend gloo"][2].startswith("--engine pool runs ranks as processes")
    assert table["backend nccl"][2] == "--engine pool --device cuda does so with a GPU a rank"
    assert doctor.judge_machine(FULL)[1].startswith("0 of 15")


@pytest.mark.parametrize(
    ("changed", "what", "words"),
    [
        ({"python": "3.10.9"}, "python", "too old: 3.11 or newer"),
        ({"python": "3.9rc10"}, "python", "too old: 3.11 or newer"),
        ({"torch_note": doctor._torch_note("2.10.0")}, "torch", "shardproof was tested with 2.11 to 2.15"),
        ({"backends": ("nccl",)}, "backend gloo", "the in-process engine does not need them"),
        ({"backends": ("gloo",)}, "backend nccl", "no process groups over nccl"),
        ({"gpus": ()}, "GPU", "--device cuda is refused"),
        ({"nsys": ""}, "nsys", "with `run --profile nsys` alone every case is unknown (exit status 1), beside torch a"),
        ({"peers": FULL.peers | {"transformers": ""}}, "transformers", "skipped: tests that compare with Hugging Face"),
        ({"peers": FULL.peers | {"megatron-core": ""}}, "megatron-core", "skipped: tests that compare with Megatron"),
        ({"peers": FULL.peers | {"deepspeed": ""}}, "deepspeed", "cannot run here"),
        ({"checkouts": FULL.checkouts | {"PICOTRON": ""}}, "PICOTRON", "names no checkout: the subject of picotron"),
        ({"checkouts": FULL.checkouts | {"NANOTRON": "/no/folder"}}, "NANOTRON", "names no checkout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_missing_is_told_with_what_follows(changed: dict[str, object], what: str, words: str) -> None:
    table = rows(dataclasses.replace(FULL, **changed))  # type: ignore[arg-type]
    assert [name for name, (_, usable, _) in table.items() if usable == "no"] == [what]
    assert words in table[what][2]


def test_a_torch_that_was_not_tested_and_an_nvtx_that_nobody_listens_to_are_notes() -> None:
    for version in ("2.16.0a0+git1", "3.0.0"):
        table = rows(dataclasses.replace(FULL, torch=version, torch_note=doctor._torch_note(version)))
        found, usable, follows = table["torch"]
        assert (found, usable) == (version, "yes")
        assert "was not tested" in follows and "anything may differ" in follows
    row = rows(dataclasses.replace(FULL, nvtx_listener=False))["nvtx"]
    assert row == ("0.2.17", "yes", "no tool listens: ranges go nowhere")


def test_the_command_describes_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert platform.python_version() in printed
    assert torch.__version__ in printed


BROKEN = {
    "missing": "raise ModuleNotFoundError(f'No module named {__name__!r}', name=__name__)",
    "broken": "raise RuntimeError('built for another numpy')",
    "leaving": "import sys; sys.exit('no licence')",
    "in part": "__version__ = '2.13.0'",
}


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (
            {"torch": "missing", **dict.fromkeys(doctor.NEEDED, "missing")},
            {"torch": "No module named 'torch'", "packages": "pandas: ModuleNotFoundError: No module named 'pandas'"},
        ),
        (
            {"torch": "in part", "nvtx": "broken", **dict.fromkeys(doctor.NEEDED, "leaving")},
            {
                "torch": "ImportError: cannot import name 'Tensor' from",
                "nvtx": "cannot be used: RuntimeError: built for another numpy",
                "packages": "rich: SystemExit: no licence",
            },
        ),
    ],
    ids=["missing", "broken"],
)
def test_whatever_is_missing_is_a_row_and_no_traceback(
    tmp_path: Path, broken: dict[str, str], told: dict[str, str]
) -> None:
    for name, how in broken.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(BROKEN[how])
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PATH": "/nowhere"}
    command = [sys.executable, "-m", "shardproof", "doctor"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    for row, words in told.items():
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"{row}  "))
        assert " no " in line and words in line
