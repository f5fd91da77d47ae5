"""`python -m bench.clean` counts an alarm where there is one."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bench.clean import main
from shardproof.parallel.subject import subject as ours
from shardproof.reference.case import Case


def wrong(case: Case, device: torch.device) -> Mapping[str, object]:
    """Ours, with the first loss a little too large."""
    outcome = dict(ours(case, device))
    loss = outcome["loss/0"]
    assert isinstance(loss, Tensor)
    return outcome | {"loss/0": loss * (1 + 1e-6)}


vars(wrong)["modes"] = ("tp",)


def test_an_alarm_is_counted(tmp_path: Path) -> None:
    words = ("--subject", f"{__name__}:wrong", "--cases", "1", "--dtype", "float64", "--steps", "1")
    assert main([*words, "--out", str(tmp_path)]) == 1
    (alarm,) = (json.loads(line) for line in (tmp_path / "alarms-float64-1-of-1.jsonl").read_text().splitlines())
    assert alarm["check"] == "forward" and Case.parse(alarm["case"]).steps == 1
