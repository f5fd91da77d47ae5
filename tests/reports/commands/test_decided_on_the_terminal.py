"""What a verdict covers, as `run`, `show`, the page and the JSON tell it: how many tensors, and which are undecided."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from reference.case import Case
from tests.harness.command_line import CommandLine

CASE = "mode=tp tp=1 layers=1 hidden=16 heads=2 vocab=24 seq=8 micro=1 steps=1 dtype=bfloat16"
TOLD = "undecided: 15 of 23 gradients in 1 case, since rounding explains any error of them or they do not merge: "


def amplified(dtype: torch.dtype) -> Tensor:
    """1 in float64; where sums are rounded it is that error many times over, as behind a router that flips."""
    row = torch.linspace(0.1, 1, 640, dtype=torch.float64).to(dtype).reshape(1, -1)
    exact = row.double() @ row.double().T
    return 1 + 1e3 * ((row @ row.T).double() - exact) / exact


def outcome(case: Case, routed: int) -> dict[str, Tensor]:
    """A loss, and 23 gradients, so many of them of experts."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    named = {"loss/0": torch.tensor(5.0)}
    named |= {f"grad/experts.{number}.weight": amplified(dtype).expand(3, 4) for number in range(routed)}
    return named | {f"grad/layers.{number}.weight": torch.full((3, 4), 0.5) for number in range(23 - routed)}


def experts(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The gradient of one expert is 20 percent wrong."""
    named = {name: tensor.to(getattr(torch, case.dtype)) for name, tensor in truth(case, device).items()}
    return {**named, "grad/experts.3.weight": 1.2 * named["grad/experts.3.weight"]}


def truth(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The dense model."""
    return outcome(case, 15)


def all_experts(case: Case, device: torch.device) -> dict[str, Tensor]:
    """No gradient can be decided."""
    return {name: tensor.to(getattr(torch, case.dtype)) for name, tensor in outcome(case, 23).items()}


experts.truth = truth  # type: ignore[attr-defined]
all_experts.truth = lambda case, device: outcome(case, 23)  # type: ignore[attr-defined]


def test_undecided_gradients_are_counted_and_named_wherever_the_verdict_is_told(shardproof: CommandLine) -> None:
    status, out, _ = shardproof("run", CASE, "--subject", f"{__name__}:experts")
    assert status == 0
    told = f"note: {TOLD}grad/experts.*.weight (15)"
    last = "1 case: 1 pass, 0 fail, 0 unknown, 0 skip; 9 of 24 tensors decided: gradients 8 of 23, all others"
    assert told in out.splitlines() and out.splitlines()[-1] == last
    assert " 9 of 24  pass" in out
    _, shown, _ = shardproof("show")
    assert told in shown.splitlines() and shown.splitlines()[-1] == last
    page = Path("runs/latest/report.html").read_text()
    assert f"{TOLD}grad/experts.*.weight (15)" in page and last in page and ">9 of 24<" in page
    rows = [json.loads(line) for line in Path("runs/latest/verdicts.jsonl").read_text().splitlines()]
    assert next(row for row in rows if row["check"] == "parameter_gradients")["decided"] == {"grad": [8, 23]}


def test_a_case_with_a_kind_of_which_nothing_is_decided_is_unknown(shardproof: CommandLine) -> None:
    status, out, _ = shardproof("run", CASE, "--subject", f"{__name__}:all_experts", "--json")
    told = json.loads(out)
    assert (status, told["exit_status"], told["cases"][0]["verdict"]) == (1, 1, "unknown")
    assert (told["cases"][0]["decided"], told["cases"][0]["tensors"]) == (1, 24)
    assert told["tally"] == (
        "1 case: 0 pass, 0 fail, 1 unknown, 0 skip; 1 of 24 tensors decided: gradients 0 of 23, all others"
    )


def test_where_all_is_decided_one_phrase_says_so(shardproof: CommandLine) -> None:
    words = CASE.replace("bfloat16", "float64")
    _, out, _ = shardproof("run", words, f"{words} seed=1", "--subject", f"{__name__}:all_experts")
    assert out.splitlines()[-1] == "2 cases: 2 pass, 0 fail, 0 unknown, 0 skip; all 48 tensors decided"
    assert "undecided" not in out
