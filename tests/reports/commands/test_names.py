"""`shardproof names` and `new-subject`: all names of a truth with their shapes; files that run by the printed command.

A truth that raises is one sentence; a new subject fails once it is broken, and no file is overwritten.
"""

import shlex
import warnings
from pathlib import Path

import pytest
import torch

from bench.systems import read_cells
from shardproof.harness.subject import resolve_subject
from shardproof.reference.case import Case
from shardproof.reference.training.truth import truth
from shardproof.reports.commands.names import KINDS, OWN, names_of_truth, tables_of_names
from shardproof.reports.options.command_options import LIKE
from tests import ROOT
from tests.deep import deep
from tests.harness import own_words
from tests.harness.command_line import CommandLine
from tests.harness.toy_subjects import right

SMALL = "layers=1 hidden=16 heads=2 vocab=24 seq=8 micro=1"


def test_every_name_of_the_dense_model_is_listed_under_a_kind_that_is_explained() -> None:
    words = "metric=true optimizer=adamw lr=0.01 steps=3 dropout=0.1 init=field save=checkpoint"
    case = Case.parse(f"mode=tp tp=1 {SMALL} {words}")
    found = names_of_truth(case, resolve_subject(right))
    cpu = torch.device("cpu")
    dense = truth(case, cpu)
    assert {name: value.shape for name, value in found.items()} == {name: value.shape for name, value in dense.items()}
    shown = tables_of_names(found)
    assert not [one.title for one in shown if one.title.endswith(OWN)]
    assert {one.title.partition(":")[0] for one in shown} == set(KINDS), "no kind is explained that is not there"
    rows = [row for one in shown for row in one.rows]
    assert ("loss/0 .. loss/2", "scalar", "float64") in rows
    last = "embedding.tokens.weight"
    assert (f"param_after/0/{last} .. param_after/1/{last}", "24x16", "float64") in rows
    assert (f"param/{last}", "24x16", "float64") in rows, "the state after the last step"
    ends = {name for row in rows for name in row[0].split(" .. ")}
    assert ends <= set(dense) and {name for name in dense if "/1" not in name} <= ends


def test_names_are_printed_in_the_order_of_computation_and_what_ranks_draw_too(shardproof: CommandLine) -> None:
    status, out, err = shardproof("names", "tp=2", "--subject", f"{own_words.__name__}:subject")
    assert (status, err) == (0, "")
    assert out.startswith(f"{own_words.__name__}:subject is compared with its own dense model")
    order = [out.index(f"\n{name}") for name in ("loss/0 .. loss/1", "grad/w2", "grad/w1", "param/w2")]
    assert order == sorted(order), "gradients are computed from the last layer on"
    assert "grad/w1  24x12  float64" in out, "full shapes"
    status, out, err = shardproof("names", "tp=2 dropout=0.1 random=stateful init=shard")
    assert (status, err) == (0, "")
    assert "mask/0/embedding .. mask/1/embedding" in out and "init/embedding.tokens.weight" in out


def test_a_truth_that_cannot_be_computed_is_one_sentence(shardproof: CommandLine) -> None:
    subject = ("--subject", f"{own_words.__name__}:subject")
    assert "foo=2: is no word of this subject's cases" in shardproof.refused("names", "tp=2 foo=2", *subject)
    refused = shardproof.refused("names", "tp=2", *subject, "--truth", f"{__name__}:broken")
    assert "ValueError: no such layer" in refused and "test_names.py" in refused
    assert "this machine has" in shardproof.refused("names", "preset=llama3-405b")


def broken(case: object, device: torch.device) -> None:
    raise ValueError("no such layer")


BROKEN = {
    "mlp": ("tp=2 dp=3", "dist.all_reduce(tensor, group=group)", "pass"),
    "dtensor": ("dp=2", "dist.all_reduce(tensor, group=group)", "pass"),
    "fsdp2": ("dp=2", "(case.micro * len(dp_ranks))", "(case.micro * case.dp)"),
    "pipelining": ("pp=2", "torch.stack(losses).mean()", "torch.stack(losses).sum()"),
    "muon": ("tp=2", "case.heads // (model.tp.size() if model.tp else 1)", "case.heads"),
    "muon-fsdp2": ("dp=2", "(case.micro * len(dp_ranks))", "(case.micro * case.dp)"),
    "lora": ("tp=2 sp=true", "and (kind in self.used or self.sp)", "and kind in self.used"),
    "lora-peft": ("dp=2", "(case.micro * len(dp_ranks))", "(case.micro * case.dp)"),
    "mixer": ("cp=2", "range(self.cp.rank())", "range(0)"),
    "policy": ("cp=2 mean=sequence", "sum_over(mask.sum(1), cp)", "mask.sum(1).clamp(min=1)"),
    "resume": ("dp=2 stop=1 then=2", 'trainer.progress |= states.pop("progress")', 'states.pop("progress")'),
    "split-backward": ("pp=2", 'dist.all_reduce(weights["table"].grad, group=ends)', "pass"),
    "quantised": ("dp=2", "train(case, [dp], *places", "train(case, [0], *places"),
    "refit": ("tp=2 serve=2", "torch.cat(parts, dim)", "torch.cat(parts[::-1], dim)"),
    "compiled": ("dp=2 steps=1", "(case.micro * len(dp_ranks))", "(case.micro * case.dp)"),
    "trainer": ("dp=2 steps=1", "across_devices=True", "across_devices=False"),
    "hf": ("tp=2 tied=true", '"kind": "llama"', '"kind": "qwen3"'),
    "deepspeed": ("dp=2", "engine, step, micro, dp_rank)", "engine, step, micro, 0)"),
    "megatron": ("tp=2 dropout=0.1", "seed(case.seed)\n    model", "seed(case.seed, tp_rank=0)\n    model"),
    "megatron-training": ("dp=2 steps=1", "micro, dp_rank, 2).start", "micro, 0, 2).start"),
    "torchtitan": ("dp=2 steps=1", '[case.axis_rank("dp", torch.distributed.get_rank())]', "[0]"),
    "torchtitan-recipe": ("dp=2 steps=1", "(step, micro, dp_rank, ROWS)", "(step, micro, 0, ROWS)"),
}
"""Cases and bugs planted, in order.

Gradients that are not summed over dp, averaged twice, a loss summed over micro-batches, a defect of transformers 5.23.
Then the same samples on every rank, equal masks for different heads, the same samples twice. Of the newer ones a number
of heads before tp, averages, a factor that is not summed, a state that is not handed on, lengths of a rank's own part,
a number of steps that is not loaded, a table that is not summed over both ends, and the same samples on every rank.
"""


LONG = {"megatron-training", "torchtitan", "muon", "lora", "mixer", "policy", "resume", "split-backward", "quantised"}
LONG |= {"refit", "compiled", "trainer", "torchtitan-recipe"}
SMALLER = {"dtensor": ("tp=2 dp=2 micro=1 steps=1", "tp=2 dtype=float32 micro=1 steps=1")}
"""Cases in place of the file's own, where those are dear: a small call of DTensor takes a millisecond."""
PROVED = {like for like in LIKE if like.replace("-", "_") in {cell.subject for cell in read_cells() if cell.quick}}
"""Files of the matrix of systems: tests/suites/test_foreign_subjects.py proves quick cases of them."""


def needed(like: str) -> None:
    packages = {"hf": "transformers", "deepspeed": "deepspeed", "torchtitan": "torchtitan", "lora-peft": "peft"}
    packages |= {"trainer": "accelerate", "torchtitan-recipe": "torchtitan"}
    if package := packages.get(like, "megatron.core" if like.startswith("megatron") else ""):
        with warnings.catch_warnings(action="ignore"):  # its own, at import
            pytest.importorskip(package, reason=f"needs {package}")


def test_a_new_subject_is_short_and_the_command_that_runs_it_is_printed(shardproof: CommandLine) -> None:
    for like in LIKE:
        name = f"my_{like.replace('-', '_')}"
        status, out, err = shardproof("new-subject", f"{name}.py", "--like", like)
        assert status == 0 and (err == "" or err.startswith("note: it needs "))
        assert shlex.split(out.splitlines()[-1]) == ["shardproof", "run", "--subject", f"{name}:subject"]
        text = Path(f"{name}.py").read_text()
        assert text.count("\n") <= (120 if like in LONG else 60), "it is read in one go"
        assert text == (ROOT / "suites" / "subjects" / f"{like.replace('-', '_')}.py").read_text()


@pytest.mark.filterwarnings("ignore")  # those of libraries
@pytest.mark.parametrize("like", [*sorted({*LIKE} - PROVED), *deep("up to ten CPU seconds each", *sorted(PROVED))])
def test_a_new_subject_passes(like: str, shardproof_here: CommandLine) -> None:
    needed(like)
    name = f"my_{like.replace('-', '_')}"
    assert shardproof_here("new-subject", f"{name}.py", "--like", like)[0] == 0
    status, out, err = shardproof_here("run", *SMALLER.get(like, ()), "--subject", f"{name}:subject")
    assert status == 0, out
    assert err.count("] pass ") == len(err.splitlines()) >= 2
    assert f"compared with {'itself' if like.startswith('megatron') else 'its own dense model'}" in out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("like", [[*LIKE][0], *deep("ten CPU seconds each", *[*LIKE][1:])])
def test_it_fails_once_it_is_broken(like: str, shardproof_here: CommandLine) -> None:
    needed(like)
    assert shardproof_here("new-subject", "mine.py", "--like", like)[0] == 0
    text, (case, right, wrong) = Path("mine.py").read_text(), BROKEN[like]
    assert text.count(right) == 1
    broken = f"broken_{like.replace('-', '_')}"
    Path(f"{broken}.py").write_text(text.replace(right, wrong))
    status, out, _ = shardproof_here("run", case, "--subject", f"{broken}:subject")
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
