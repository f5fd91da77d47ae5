"""Right programs of other hands pass, drawn wrong edits of them are found, and what passes is below its limit."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from bench import clean, foreign_bugs
from bench.clean import Part
from bench.foreign_bugs import PASSED, UNDECIDED, Row, change, report, units_of
from bench.foreign_cases import DTYPES, SUBJECTS, Drawn, drawn_cases, subject_of
from bench.foreign_edits import EVERY, POINTS, SIZES, Edit, Planted, drawn_edit, planting
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import RequestError
from shardproof.harness.outcome.merging import merge
from shardproof.harness.running.proof import prove
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.subject import case_of

QUICK = {
    "numpy_truth": "tp=2 dp=3",
    "vocabulary_loss": "tp=3 dtype=float32 seed=5",
    "zero1_buckets": "tp=2 dp=2 dtype=bfloat16",
    "pipeline_1f1b": "pp=3 seed=7",
    "autocast": "tp=2 dp=2 steps=3 micro=3 dtype=float32 seed=1391 inner=18",  # its first draw of rounding is near zero
}


def drawn(name: str, text: str) -> Drawn:
    return Drawn(subject_of(name), case_of(text, subject_of(name)))


def tensors(planted: Planted, case: Any, engine: InprocEngine) -> dict[str, torch.Tensor]:
    with planting():
        return dict(merge(execute(case, planted, engine, record=False).outcomes).tensors)


def test_right_programs_of_other_hands_pass_in_one_process(engine: InprocEngine) -> None:
    results = [prove(one.case, one.subject, engine) for one in (drawn(*each) for each in QUICK.items())]
    assert [(result.text, result.verdict) for result in results] == [(result.text, "pass") for result in results]


@pytest.mark.deep("two CPU minutes")
def test_no_drawn_case_of_a_foreign_subject_raises_an_alarm() -> None:
    part = Part(foreign=True, cases=4 * len(SUBJECTS), first_seed=3)
    found = [alarm for _, alarms in clean.campaign(part) for alarm in alarms if alarm.verdict == "fail"]
    assert [(alarm.subject, alarm.case, alarm.check) for alarm in found] == []


def test_subjects_take_turns_in_every_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("ring", "experts", "spectral")
    cases = drawn_cases(9, 1, names)
    assert [one.subject.name.split(":")[0].rpartition(".")[2] for one in cases] == [*names] * 3
    assert [one.case.dtype for one in cases][::3] == list(DTYPES)
    assert {one.case.dtype for one in cases[2::3]} == {"float64", "float32"}  # no complex numbers in bfloat16
    assert [str(one.case) for one in drawn_cases(9, 1, names)] == [str(one.case) for one in cases]
    low = drawn_cases(8, 1, names, "bfloat16")
    assert len(low) == 8 and {one.case.dtype for one in low} == {"bfloat16"}
    every = [one.case for one in drawn_cases(3 * len(SUBJECTS), 4)]
    assert all(case.world_size > 1 and case.steps > 1 for case in every) and len(every) == 3 * len(SUBJECTS)
    split = {axis for case in every for axis, groups in case.axes.items() if len(groups[0]) > 1}
    assert split == {"tp", "cp", "dp", "pp"}
    with pytest.raises(RequestError, match="is no foreign subject"):
        subject_of("other")
    assert clean.main(["--foreign", "5", "--steps", "2", "--out", str(tmp_path)]) == 2
    assert "foreign=5: its subjects have words of their own" in capsys.readouterr().err


def test_an_edit_changes_what_it_names_and_nothing_before_it(engine: InprocEngine) -> None:
    subject, case = drawn("numpy_truth", "tp=2 dp=3")
    still = Planted(subject, frozen=True)
    first, right = tensors(still, case, engine), tensors(Planted(subject), case, engine)
    assert torch.equal(right["param/b"], tensors(Planted(subject), case, engine)["param/b"])
    assert torch.allclose(
        first["param/b"], torch.tensor(subject_start(case))
    )  # a frozen run returns what it began with
    assert {rank: passed["step"] for rank, passed in still.counts.items()} == dict.fromkeys(range(6), 2)
    for what in POINTS:
        if POINTS[what].endswith(" step"):
            continue  # SGD without momentum keeps no state
        edit = Edit(what=what, rank=EVERY, at=1, share=0.0, size=1e-3)
        wrong = tensors(Planted(subject, edit), case, engine)
        changed = {name for name in right if not torch.equal(wrong.get(name, right[name]), right[name])}
        assert changed or not wrong.keys() >= right.keys(), what
        if POINTS[what] == "step":  # its second one
            assert changed <= {"param/w", "param/b"}, what


def subject_start(case: Any) -> Any:
    from bench.foreign.numpy_truth import begin  # noqa: PLC0415

    return begin(case)[1]


def test_edits_are_drawn_among_the_points_that_there_are() -> None:
    counts = {0: {"step": 2, "backward": 4}, 1: {"step": 2, "backward": 4, "collective": 1}}
    edits = [drawn_edit(counts, "float32", Random(seed)) for seed in range(200)]
    assert {POINTS[edit.what] for edit in edits} == {"step", "backward", "collective"}
    assert {edit.rank for edit in edits if POINTS[edit.what] == "collective"} == {1}
    assert {edit.rank for edit in edits if POINTS[edit.what] == "backward"} == {EVERY, 0, 1}
    assert {edit.at for edit in edits if POINTS[edit.what] == "backward"} == {0, 1, 2, 3}
    assert {edit.size for edit in edits} == {SIZES["float32"]}
    with pytest.raises(ValueError, match="legal: one with an optimizer"):
        drawn_edit({0: {}}, "float32", Random(0))


def test_a_campaign_finds_edits_and_measures_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--subject", "numpy_truth", "--edits", "4", "--dtype", "float32", "--out", str(tmp_path)]
    assert foreign_bugs.main(words) == 0
    rows = list(csv.DictReader((tmp_path / "foreign_bugs-float32-0.csv").read_text().splitlines()))
    assert len(rows) == 4 and {row["verdict"] for row in rows} == {"found"}
    for row in rows:
        assert row["check"] and (not row["tensor"] or float(row["units"]) > 1)
    assert "float32: 4 edits: 4 found" in capsys.readouterr().out


def test_what_rounding_does_not_explain_is_a_defect_and_comes_first() -> None:
    near = Row(subject="a", case="dp=2", dtype="bfloat16", edit="e", verdict=PASSED, tensor="grad/w", units=1.9)
    beyond = Row(subject="b", case="dp=2", dtype="bfloat16", edit="e", verdict=PASSED, tensor="param/w", units=2.5)
    lines = list(report([near, beyond, replace(beyond, verdict=UNDECIDED)]))
    assert lines[0] == "DEFECT passed: b 'dp=2': e" and lines[4] == "passed: a 'dp=2': e"
    assert lines[-1] == "1 passed although they change a tensor by more than rounding may"


def test_a_change_is_measured_in_units_of_what_rounding_did_to_the_tensor() -> None:
    """Of 100 elements that move by 1 rounding is off by 1e-3 each: 6e-3 are allowed, and half an epsilon of 10."""
    moved, error, floors = torch.ones(100), torch.full((100,), 1e-3), units_of(torch.float32)
    stored = torch.full((100,), 10.0)
    found = change("param/w", torch.full((100,), 1.2e-2), error, moved, stored, floors, 0.0)
    assert found.units == pytest.approx(2.0, rel=1e-3)
    assert (found.change, found.rounding) == pytest.approx((1.2e-2, 1e-3))
    one = torch.zeros(100)
    one[3] = 1.2e-2
    found = change("param/w", one, error, moved, stored, floors, 0.0)
    assert found.by == "peak" and found.units == pytest.approx(2.0, rel=1e-3)
    low = change("param/w", 1e-3 * moved, 0 * error, moved, stored, units_of(torch.bfloat16), 0.0)
    assert low.units == pytest.approx(1e-3 / (4 / 128 + 10 / 256))


def test_a_foreign_alarm_names_its_subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Planted(
        subject_of("numpy_truth"),
        Edit(what="the learning rate of a step times 1 + e", rank=EVERY, at=0, share=0, size=1),
    )
    monkeypatch.setattr(clean, "drawn_cases", lambda *_, **__: [Drawn(wrong.named, drawn("numpy_truth", "dp=2").case)])
    with planting():
        assert clean.main(["--foreign", "1", "--out", str(tmp_path)]) == 1
    alarms = [json.loads(line) for line in (tmp_path / "alarms-foreign-any-1-of-1.jsonl").read_text().splitlines()]
    assert {alarm["subject"] for alarm in alarms} == {"bench.foreign.numpy_truth:subject"}
    assert {"update", "forward"} <= {alarm["check"] for alarm in alarms}
