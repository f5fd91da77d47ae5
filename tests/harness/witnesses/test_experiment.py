"""The published experiment by name: its case, its witnesses, and the list of calls in the order of one micro-batch."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from harness.cases import parse_cases
from harness.errors import RequestError
from harness.running.request import Request
from harness.running.run import run
from harness.subject import named
from reports.commands.show import experiment_table
from reports.options.checks import EXPERIMENTS, complete_experiment, profiled_steps, real_size
from reports.stored.frames import load

NAME = "gpt3-857m-tp4"


def arguments(**words: object) -> argparse.Namespace:
    given: dict[str, object] = {
        "preset_experiment": NAME,
        "cases": [],
        "device": "cpu",
        "profile": "",
        "profile_steps": None,
        "subject": "x:y",
    }
    return argparse.Namespace(**(given | words))


def test_the_name_stands_for_case_subject_and_witnesses() -> None:
    filled = arguments()
    complete_experiment(filled)
    (case,) = parse_cases(filled.cases)
    assert (case.mode, case.world_size, case.dtype) == ("tp", 4, "float16")
    assert (filled.subject, filled.profile) == ("parallel.subject:subject", "torch,nsys")
    assert list(profiled_steps(filled, (case,)) or ()) == [2, 3, 4]
    full = arguments(device="cuda")
    complete_experiment(full)
    (case,) = parse_cases(full.cases)
    assert (getattr(case, "layers", 0), getattr(case, "hidden", 0)) == (24, 1024)
    assert "--device cuda" in real_size(NAME)


@pytest.mark.parametrize("words", [{"preset_experiment": "gpt5"}, {"cases": ["mode=tp tp=2"]}])
def test_an_unknown_or_mixed_request_is_refused(words: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=r"preset-experiment=.*legal"):
        complete_experiment(arguments(**words))


def test_the_list_has_every_call_of_a_micro_batch_in_order(tmp_path: Path) -> None:
    small = EXPERIMENTS[NAME].small.replace("layers=4", "layers=2").replace("tp=4", "tp=2")
    case = f"{small} steps=1 micro=2"
    result = run(Request(cases=parse_cases((case,)), subject=named(EXPERIMENTS[NAME].subject), out=tmp_path))
    assert result.exit_status == 0
    rows = experiment_table(load(result.path), NAME).rows
    # modes.md 5: 5 broadcasts; forward 1 + 2 a layer, loss 3; backward 2 a layer + 1 of the head.
    assert [row[:5] for row in rows] == [
        ("data", "broadcast", "-", "-", "5"),
        ("forward", "all_reduce", "embedding", "word_embeddings", "1"),
        ("forward", "all_reduce", "attention.wo", "linear_proj", "2"),
        ("forward", "all_reduce", "mlp.w2", "linear_fc2", "2"),
        ("loss", "all_reduce", "-", "-", "3"),
        ("backward", "all_reduce", "head", "output_layer", "1"),
        ("backward", "all_reduce", "mlp.w1", "linear_fc1", "2"),
        ("backward", "all_reduce", "attention.wqkv", "linear_qkv", "2"),
        ("grad_sync", "all_reduce", "-", "-", "2"),
    ]
    assert [row[6] for row in rows] == ["yes"] * 4 + ["no"] * 5
