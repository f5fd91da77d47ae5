"""`shardproof names`: all names of a truth, each with its full shape, and one sentence for a truth that raises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.subject import named
from reference.case import Case
from reference.training.subject import truth
from reports.commands.names import KINDS, OWN, names, tables
from tests.harness import own_words
from tests.harness.command_line import CommandLine, command_line
from tests.harness.toy_subjects import right

SMALL = "layers=1 hidden=16 heads=2 vocab=24 seq=8 micro=1"
OURS = named(right)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return command_line(tmp_path, monkeypatch, capsys)


def test_every_name_of_the_dense_model_is_listed_under_a_kind_that_is_explained() -> None:
    words = "metric=true optimizer=adamw lr=0.01 steps=3 dropout=0.1 init=field save=checkpoint"
    case = Case.parse(f"mode=tp tp=1 {SMALL} {words}")
    found = names(case, OURS)
    cpu = torch.device("cpu")
    dense = truth(case, cpu)
    assert {name: value.shape for name, value in found.items()} == {name: value.shape for name, value in dense.items()}
    shown = tables(found)
    assert not [one.title for one in shown if one.title.endswith(OWN)]
    assert {one.title.partition(":")[0] for one in shown} == set(KINDS), "no kind is explained that is not there"
    rows = [row for one in shown for row in one.rows]
    assert ("loss/0 .. loss/2", "scalar", "float64") in rows
    last = "embedding.tokens.weight"
    assert (f"param_after/0/{last} .. param_after/1/{last}", "24x16", "float64") in rows
    assert (f"param/{last}", "24x16", "float64") in rows, "the state after the last step"
    ends = {name for row in rows for name in row[0].split(" .. ")}
    assert ends <= set(dense) and {name for name in dense if "/1" not in name} <= ends


def test_names_are_printed_in_the_order_of_computation(command: CommandLine) -> None:
    status, out, err = command("names", "tp=2", "--subject", f"{own_words.__name__}:subject")
    assert (status, err) == (0, "")
    assert out.startswith(f"{own_words.__name__}:subject is compared with its own dense model")
    order = [out.index(f"\n{name}") for name in ("loss/0 .. loss/1", "grad/w2", "grad/w1", "param/w2")]
    assert order == sorted(order), "gradients are computed from the last layer on"
    assert "grad/w1  24x12  float64" in out, "full shapes"


def test_what_ranks_draw_is_named_too(command: CommandLine) -> None:
    status, out, err = command("names", "tp=2 dropout=0.1 random=stateful init=shard")
    assert (status, err) == (0, "")
    assert "mask/0/embedding .. mask/1/embedding" in out and "init/embedding.tokens.weight" in out


def test_a_truth_that_cannot_be_computed_is_one_sentence(command: CommandLine) -> None:
    subject = ("--subject", f"{own_words.__name__}:subject")
    assert "foo=2: is no word of this subject's cases" in command.refused("names", "tp=2 foo=2", *subject)
    refused = command.refused("names", "tp=2", *subject, "--truth", f"{__name__}:broken")
    assert "ValueError: no such layer" in refused and "test_names.py" in refused
    assert "this machine has" in command.refused("names", "preset=llama3-405b")


def broken(case: object, device: torch.device) -> None:
    """A truth that raises."""
    raise ValueError("no such layer")
