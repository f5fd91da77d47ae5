"""`shardproof new-subject`: each file runs by the printed command and fails once it is broken; none is overwritten."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path

import pytest

from reports.commands import cli
from reports.commands.new_subject import LIKE
from tests.deep import deep
from tests.harness.command_line import CommandLine

BROKEN = {
    "mlp": ("tp=2 dp=3", "dist.all_reduce(tensor, group=group)", "pass"),
    "dtensor": ("dp=2", "dist.all_reduce(tensor, group=group)", "pass"),
    "fsdp2": ("dp=2", "(case.micro * len(dp_ranks))", "(case.micro * case.dp)"),
    "pipelining": ("pp=2", "torch.stack(losses).mean()", "torch.stack(losses).sum()"),
    "hf": ("tp=2 tied=true", '"kind": "llama"', '"kind": "qwen3"'),
    "deepspeed": ("dp=2", "engine, step, micro, dp_rank)", "engine, step, micro, 0)"),
    "megatron": (
        "tp=2 dropout=0.1",
        "manual_seed(case.seed)\n    model",
        "manual_seed(case.seed, tp_rank=0)\n    model",
    ),
}
"""A case and a bug planted: gradients that are not summed over dp, averaged twice, a loss summed over micro-batches, a
defect of transformers 5.23, the same samples on every rank, equal masks for different heads."""


def test_the_command_line_knows_all_of_them() -> None:
    assert tuple(LIKE) == cli.LIKE


def needed(like: str) -> None:
    if package := {"hf": "transformers", "deepspeed": "deepspeed", "megatron": "megatron.core"}.get(like):
        with warnings.catch_warnings(action="ignore"):  # its own, at import
            pytest.importorskip(package, reason="needs the extra `peers`")


@pytest.mark.filterwarnings("ignore")  # those of libraries
@pytest.mark.parametrize("like", LIKE)
def test_a_new_subject_runs_by_the_printed_command(like: str, shardproof_here: CommandLine) -> None:
    needed(like)
    status, out, err = shardproof_here("new-subject", f"my_{like}.py", "--like", like)
    assert (status, err) == (0, "")
    text = Path(f"my_{like}.py").read_text()
    assert text.count("\n") <= 60, "it is read in one go"
    program, *words = shlex.split(out.splitlines()[-1])
    assert (program, words) == ("shardproof", ["run", "--subject", f"my_{like}:subject"])
    status, out, err = shardproof_here(*words)
    assert status == 0, out
    assert err.count("] pass ") == len(err.splitlines()) >= 2
    assert f"compared with {'itself' if like == 'megatron' else 'its own dense model'}" in out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("like", [*cli.LIKE[:4], *deep("ten CPU seconds each", *cli.LIKE[4:])])
def test_it_fails_once_it_is_broken(like: str, shardproof_here: CommandLine) -> None:
    needed(like)
    assert shardproof_here("new-subject", f"my_{like}.py", "--like", like)[0] == 0
    text, (case, right, wrong) = Path(f"my_{like}.py").read_text(), BROKEN[like]
    assert text.count(right) == 1
    Path(f"broken_{like}.py").write_text(text.replace(right, wrong))
    status, out, _ = shardproof_here("run", case, "--subject", f"broken_{like}:subject")
    assert status == 1 and "\nwhat:   " in out


def test_no_file_is_overwritten(shardproof: CommandLine) -> None:
    Path("mine.py").write_text("mine")
    for file, rule in (
        ("mine.py", "file=mine.py: exists, and no file is overwritten; legal: a new name"),
        ("mine.txt", "file=mine.txt: must be the file of a module; legal: my_model.py"),
        ("my-model.py", "file=my-model.py: must be the file of a module"),
        ("no/where.py", "file=no/where.py: cannot be written (No such file or directory)"),
    ):
        assert rule in shardproof.refused("new-subject", file)
    assert Path("mine.py").read_text() == "mine"
    Path("deeper here").mkdir()
    status, out, _ = shardproof("new-subject", "deeper here/mine.py")
    assert status == 0 and "cd 'deeper here' && shardproof run --subject mine:subject" in out
