"""`shardproof new-subject`: each file runs by the printed command and fails once it is broken; none is overwritten."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path

import pytest

from reports.commands import cli
from reports.commands.new_subject import LIKE

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


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = cli.main(words)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_command_line_knows_all_of_them() -> None:
    assert tuple(LIKE) == cli.LIKE


@pytest.mark.filterwarnings("ignore")  # those of libraries
@pytest.mark.parametrize("like", LIKE)
def test_a_new_subject_runs_by_the_printed_command_and_fails_once_it_is_broken(
    like: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if package := {"hf": "transformers", "deepspeed": "deepspeed", "megatron": "megatron.core"}.get(like):
        with warnings.catch_warnings(action="ignore"):  # its own, at import
            pytest.importorskip(package, reason="needs the extra `peers`")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    status, out, err = run(capsys, "new-subject", f"my_{like}.py", "--like", like)
    assert (status, err) == (0, "")
    text = Path(f"my_{like}.py").read_text()
    assert text.count("\n") <= 60, "it is read in one go"
    program, *words = shlex.split(out.splitlines()[-1])
    assert (program, words) == ("shardproof", ["run", "--subject", f"my_{like}:subject"])
    status, out, err = run(capsys, *words)
    assert status == 0, out
    assert err.count("] pass ") == len(err.splitlines()) >= 2
    assert f"compared with {'itself' if like == 'megatron' else 'its own dense model'}" in out
    case, right, wrong = BROKEN[like]
    assert text.count(right) == 1
    Path(f"broken_{like}.py").write_text(text.replace(right, wrong))
    status, out, _ = run(capsys, "run", case, "--subject", f"broken_{like}:subject", "--when", "0")
    assert status == 1 and "\nwhat:   " in out


def test_no_file_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("mine")
    for file, rule in (
        ("mine.py", "file=mine.py: exists, and no file is overwritten; legal: a new name"),
        ("mine.txt", "file=mine.txt: must be the file of a module; legal: my_model.py"),
        ("my-model.py", "file=my-model.py: must be the file of a module"),
        ("no/where.py", "file=no/where.py: cannot be written (No such file or directory)"),
    ):
        status, out, err = run(capsys, "new-subject", file)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert rule in err
    assert Path("mine.py").read_text() == "mine"
    (tmp_path / "deeper here").mkdir()
    status, out, _ = run(capsys, "new-subject", "deeper here/mine.py")
    assert status == 0 and "cd 'deeper here' && shardproof run --subject mine:subject" in out
