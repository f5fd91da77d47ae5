"""`python -m bench.clean` counts an alarm where there is one, and none where right programs of other hands pass."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import clean
from bench.clean import Part, main
from bench.foreign_bugs import SUBJECTS, Drawn, subject_of
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.running.proof import prove
from shardproof.harness.subject import case_of
from shardproof.parallel.subject import subject as ours
from shardproof.reference.case import Case


def wrong(case: Case, device: torch.device) -> Mapping[str, object]:
    """Our subject, with a first loss that is a little too large."""
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


QUICK = {
    "numpy_truth": "tp=2 dp=3",
    "vocabulary_loss": "tp=3 dtype=float32 seed=5",
    "zero1_buckets": "tp=2 dp=2 dtype=bfloat16",
    "pipeline_1f1b": "pp=3 seed=7",
    "autocast": "tp=2 dp=2 steps=3 micro=3 dtype=float32 seed=1391 inner=18",  # its first draw of rounding is near zero
}


def drawn(name: str, text: str) -> Drawn:
    return Drawn(subject_of(name), case_of(text, subject_of(name)))


def test_right_programs_of_other_hands_pass_in_one_process(engine: InprocEngine) -> None:
    results = [prove(one.case, one.subject, engine) for one in (drawn(*each) for each in QUICK.items())]
    assert [(result.text, result.verdict) for result in results] == [(result.text, "pass") for result in results]


@pytest.mark.deep("two CPU minutes")
def test_no_drawn_case_of_a_foreign_subject_raises_an_alarm() -> None:
    part = Part(foreign=True, cases=4 * len(SUBJECTS), first_seed=3)
    found = [alarm for _, alarms in clean.campaign(part) for alarm in alarms if alarm.verdict == "fail"]
    assert [(alarm.subject, alarm.case, alarm.check) for alarm in found] == []
