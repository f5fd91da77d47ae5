"""Draws of a property, every pair of boolean words, and how it shrinks. The properties of checkpoints and modes."""

import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.outcomes import Skipped
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardproof.bugs.planting import planted, replaced
from shardproof.harness.checking.evidence import PASS
from shardproof.harness.outcome.merging import merge
from shardproof.harness.plain_case import Vocabulary
from shardproof.harness.protocols import without_saving
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.shard import Shard
from shardproof.harness.subject import named
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from shardproof.reference.language.core import MODES
from shardproof.suites.drawing.layouts import elsewhere
from shardproof.suites.drawing.pairwise import rows
from shardproof.suites.drawing.strategies import cases
from shardproof.suites.session.prover import Prover
from shardproof.suites.test_checkpoints import goes_on
from shardproof.suites.test_equivalence import apart
from tests.harness.own_words import Network, trained, weights


@pytest.mark.parametrize("mode", MODES)
def test_the_rows_have_every_pair_that_a_case_can_have(mode: str) -> None:
    words = tuple(rows(mode)[0])
    assert len(rows(mode)) <= 8
    for one, other in itertools.combinations(words, 2):
        seen = {(row[one], row[other]) for row in rows(mode)}
        impossible = {(True, True)} if {one, other} == {"packed", "attention_mask"} else set()
        assert seen == set(itertools.product((False, True), repeat=2)) - impossible, (one, other)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=3, database=None, phases=(Phase.generate,))
@given(data=st.data())
def test_a_case_has_the_words_of_its_row(mode: str, data: st.DataObject) -> None:
    for row in rows(mode):
        case = data.draw(cases(mode, flags=row))
        meant = {word: value for word, value in row.items() if not (word == "attention_mask" and case.packed)}
        assert {word: getattr(case, word) for word in meant} == meant


def _ten_draws(prover: Prover, mode: str) -> list[Any]:
    drawn: list[Any] = []

    @settings(max_examples=10, database=None, phases=(Phase.generate,))
    @given(data=st.data())
    def draw(data: st.DataObject) -> None:
        drawn.append(prover.drawn(data, mode))

    draw()
    return drawn


def test_ten_draws_of_a_property_meet_every_row_and_another_property_draws_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Prover.on("shardproof.parallel.subject:subject", "2,3,4,6") as prover:
        first: list[Any] = []
        for name in ("suites/test_a.py::test_a[isp] (call)", "suites/test_b.py::test_b[isp] (call)"):
            monkeypatch.setenv("PYTEST_CURRENT_TEST", name)
            drawn = _ten_draws(prover, "isp")
            first.append(drawn[0])
            for row in rows("isp"):
                assert any(all(getattr(case, word) == value for word, value in row.items()) for case in drawn), row
    assert first[0] != first[1]


Wrong = Callable[[Case], bool]
SMALLEST = {"tp": 2, "dp": 1, "layers": 1, "micro": 3, "steps": 2, "batch": 2, "seed": 0, "label_smoothing": 0.0}


@pytest.mark.parametrize(
    ("wrong", "left"),
    [
        (lambda case: True, {}),
        (lambda case: case.dp > 1, {"tp": 2, "dp": 3, "micro": 4}),
        (lambda case: case.tp > 2, {"tp": 3, "micro": 2}),
        (lambda case: case.layers > 1, {"layers": 2}),
        (lambda case: case.micro > 2 and case.qk_norm, {"qk_norm": True}),
    ],
    ids=["anywhere", "data ranks", "three ranks", "two layers", "normalised heads"],
)
def test_what_is_drawn_shrinks_to_the_smallest_mesh_depth_and_batch(wrong: Wrong, left: dict[str, object]) -> None:
    """As if a bug showed wherever `wrong` says so."""
    plain = settings(max_examples=300, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    case = find(cases("isp"), wrong, settings=plain)
    expected = {**SMALLEST, **left}
    assert {word: getattr(case, word) for word in expected} == expected


SHAPES = {"w1": (24, 12), "w2": (12, 24)}


class Saving(Network):
    """The network in whose cases save= and load= name folders: a file of shards by every rank. `wrong`: a bug."""

    words: Any = {"width": 12, "act": "relu", "save": "none", "load": "none"}
    cases: Any = ("tp=2 dp=3", "tp=3", "dp=2")

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong

    @staticmethod
    def truth(case: Any, device: torch.device) -> Mapping[str, Tensor]:
        """Dense training from the same folder; it is never given one to save into."""
        assert case.save == "none"
        return trained(case, *(_read(case.load, case.dtype) if case.load != "none" else weights(case)))

    def weights(self, case: Any) -> tuple[Tensor, Tensor]:
        """Weights of the folder, which every rank cuts for itself."""
        w1, w2 = _read(case.load, case.dtype) if case.load != "none" else weights(case)
        return (w1.roll(1, 0), w2) if self.wrong == "load" and case.load != "none" else (w1, w2)

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        outcome = dict(super().__call__(case, device))
        if case.save == "none" or self.wrong == "nothing":
            return outcome
        held = {name: outcome[f"param/{name}"] for name in ("w1", "w2")}
        if self.wrong == "save":
            held["w1"] = replace(held["w1"], local=held["w1"].local.flip(0))
        Path(case.save).mkdir(exist_ok=True)
        torch.save({n: (x.local, x.offsets) for n, x in held.items()}, Path(case.save) / f"{dist.get_rank()}.pt")
        dist.barrier()
        files = dict(zip(("w1", "w2"), _read(case.save, case.dtype), strict=True)) if dist.get_rank() == 0 else {}
        return outcome | {f"saved/param/{n}": Shard(x, (0, 0), tuple(x.shape)) for n, x in files.items()}


def _read(folder: str, dtype: str) -> tuple[Tensor, Tensor]:
    """W1 and W2 in full."""
    whole = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in SHAPES.items()}
    for file in Path(folder).glob("*.pt"):
        for name, (local, at) in torch.load(file).items():
            whole[name][at[0] : at[0] + local.shape[0], at[1] : at[1] + local.shape[1]] = local
    w1, w2 = (tensor.to(getattr(torch, dtype)) for tensor in whole.values())
    return w1, w2


WRONG = {
    "save": (AssertionError, "saved/param/w1"),
    "load": (AssertionError, "loss/0"),
    "nothing": (Skipped, "writes no"),
}


@pytest.mark.parametrize("wrong", ["", *WRONG])
def test_it_holds_for_a_subject_of_its_own_words(prover: Prover, tmp_path: Path, wrong: str) -> None:
    theirs = replace(prover, subject=named(Saving(wrong)))
    case = Vocabulary.of(Saving.words).parse("tp=2 dp=3 steps=1")
    other = elsewhere(case, theirs.subject, prover.worlds, Random(2))
    assert other.axes != case.axes and other.micro * len(other.axes["dp"][0]) == 6
    error, words = WRONG.get(wrong, (AssertionError, ""))
    with pytest.raises(error, match=words) if wrong else nullcontext():
        goes_on(theirs, case, other, tmp_path / "saved")
    assert without_saving(case.but(save="somewhere")) == {"save": "none"} and not without_saving(case)


def test_a_bug_that_only_another_layout_shows(prover: Prover, tmp_path: Path) -> None:
    """States of streams are restored at any layout (252 of 256 ranks had a foreign one: PR #6858)."""
    words = "layers=1 heads=6 hidden=12 seq=12 steps=1 micro=3 lr=0.1 dropout=0.1 random=stateful"
    case = Case.parse(f"mode=tp tp=2 {words}")
    everywhere = ("same = RANKS in common and torch.equal", "same = True or torch.equal")
    wrong = replace(prover, subject=named(planted(replaced("shardproof.parallel.checkpoints.saving", *everywhere))))
    goes_on(wrong, case, case, tmp_path / "alike")
    assert {one.verdict for one in wrong.proof(case.but(load=str(tmp_path / "alike"))).verdicts} == {PASS}
    with pytest.raises(AssertionError, match="rng.tp2.cp0.dp0.pp0.* is missing"):
        goes_on(wrong, case, case.but(tp=3), tmp_path / "moved")
    goes_on(prover, case, case.but(tp=3), tmp_path / "right")


def test_a_mode_that_computes_something_else_is_noticed(prover: Prover) -> None:
    case = Case.parse("mode=tp tp=2 layers=1 heads=4 hidden=16 ffn=24 seq=8 vocab=264 steps=1")
    larger = replaced(
        "shardproof.parallel.layers.linear", "grad_x = reduced.wait()", "grad_x = reduced.wait() * (1 + 1e-9)"
    )
    runs = [execute(case, run, prover.engine, text=str(case)) for run in (subject, planted(larger))]
    right, other = (dict(merge(run.outcomes).tensors) for run in runs)
    assert apart(right, right) == []
    assert "grad/layers.0.mlp.w1.weight" in apart(right, other)
