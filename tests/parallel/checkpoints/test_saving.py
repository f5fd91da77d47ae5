"""Checkpoints: training goes on as if nothing had happened; planted bugs are killed, with the right first place.

A load is held against the dense model, which begins with the same files; a save against what the ranks hold. States of
random streams, which no dense model knows, are held to a round trip.
"""

from pathlib import Path

import pytest
import torch

from shardproof.bugs.planting import plant_subject, planted_module
from shardproof.harness.verdicts.verdict import FAIL, PASS
from shardproof.parallel.checkpoints.comparing import compare
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from shardproof.suites.mutants.catalogue import Mutant, of_file
from shardproof.suites.session.prover import Prover
from tests.deep import deep
from tests.parallel.checkpoints.layouts import MODEL, relaid, trained
from tests.parallel.ranks import outcome

ADAMW = "optimizer=adamw lr=0.01 clip=0.05"
HALF = "dtype=float16 master=float32 optimizer=adamw lr=0.01 scaler=dynamic loss_scale=8"
SAME = (
    f"mode=tp-sp tp=2 dp=3 zero=1 bucket=700 micro=2 {ADAMW} dropout=0.1 attention_dropout=0.1 random=stateful",
    f"mode=tp tp=2 cp=2 zero=3 micro=3 {ADAMW} tied=false dropout=0.1",
    f"mode=tp tp=2 pp=3 layers=4 first_layers=2 micro=3 {ADAMW}",
    f"mode=tp tp=1 pp=2 dp=2 schedule=interleaved chunks=2 layers=4 zero=1 bucket=700 micro=4 {ADAMW}",
    f"mode=tp tp=2 dp=3 zero=1 micro=2 {HALF} grad_dtype=float32",
    "mode=isp tp=3 dp=2 wp=2 micro=3",
)


@pytest.mark.parametrize("words", [SAME[0], *deep("two CPU seconds each", *SAME[1:])])
def test_in_one_layout_training_goes_on_bit_for_bit(tmp_path: Path, words: str) -> None:
    case, folder = Case.parse(f"{MODEL} {words}"), str(tmp_path / "half")
    whole = outcome(str(case.but(steps=2)))
    trained(case.but(steps=1, save=folder))
    second = outcome(str(case.but(steps=1, load=folder)))
    again = {name: tensor for name, tensor in second.items() if name.startswith("param/")}
    assert len(again) > 20
    again |= {f"{kind}/1": second[f"{kind}/0"] for kind in ("loss", "logits", "grad_norm")}
    assert not [name for name, tensor in again.items() if not torch.equal(tensor, whole[name])]


SMALL_MODEL = "layers=1 heads=6 kv_heads=6 hidden=24 ffn=42 vocab=389 seq=8 batch=2 micro=1 lr=0.01 optimizer=adamw"
CASE = Case.parse(f"{SMALL_MODEL} activation=swiglu fuse_mlp=true mode=tp tp=2 steps=1")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("mutants") / "saved")
    trained(CASE.but(save=folder))
    return folder


def test_the_right_load_passes(prover: Prover, saved: str) -> None:
    assert not [one for one in prover.proof(CASE.but(load=saved), subject).verdicts if one.verdict == FAIL]


@pytest.mark.parametrize("bug", of_file("tests/checkpoint_loads"), ids=lambda bug: bug.name)
def test_it_is_killed(prover: Prover, saved: str, bug: Mutant) -> None:
    found = prover.proof(CASE.but(load=saved), plant_subject(bug.sources()))
    failed = [one.message for one in found.verdicts if one.verdict == FAIL]
    assert failed and any(f"phase {bug.phase}" in message for message in failed), failed


SCALED = Case.parse(
    "mode=tp tp=2 layers=1 heads=2 hidden=8 vocab=32 seq=4 steps=2 dtype=float16 master=float32 scaler=dynamic "
    "loss_scale=8"
)
_FLAT = f"{SMALL_MODEL} activation=swiglu fuse_mlp=true mode=tp tp=1 dp=2 zero=1 bucket=700 steps=1"
_CASES = {
    "padding-of-buckets-taken-for-data": Case.parse(_FLAT),
    "one-step-too-few": SCALED,
    "the-first-loss-scale": SCALED,
}
"""Wrong save -> a case of its own."""
WRONG_SAVES = of_file("tests/checkpoint_saves")


def test_the_right_save_passes(prover: Prover, tmp_path: Path) -> None:
    found = {one.check: one for one in prover.proof(CASE.but(save=str(tmp_path / "a")), subject).verdicts}
    assert found["saved"].verdict == PASS and found["saved"].message.startswith("65 tensors of the checkpoint")


@pytest.mark.parametrize("bug", WRONG_SAVES, ids=lambda bug: bug.name)
def test_a_wrong_save_is_seen_where_it_is_written(prover: Prover, tmp_path: Path, bug: Mutant) -> None:
    case = _CASES.get(bug.name, CASE)
    found = prover.proof(case.but(save=str(tmp_path / "a")), plant_subject(bug.sources()))
    failed = {one.check: one.message for one in found.verdicts if one.verdict == FAIL}
    assert failed.keys() & {"saved", "merge"} and not failed.keys() - {"saved", "merge", "coverage"}, failed
    assert not bug.alone or [*failed] == ["saved"]
    first = next(message for check, message in failed.items() if check != "coverage")
    assert bug.region in first and (case is SCALED or "phase checkpoint" in first), failed


@pytest.mark.parametrize("bug", [None, *of_file("tests/checkpoint_resaves")], ids=lambda bug: bug.name if bug else "")
def test_a_save_behind_a_load_counts_on(prover: Prover, tmp_path: Path, bug: Mutant | None) -> None:
    """Two steps, and two more: four steps are saved, all finite in a row."""
    trained(SCALED.but(save=str(tmp_path / "a")))
    again = SCALED.but(load=str(tmp_path / "a"), save=str(tmp_path / "b"))
    found = prover.proof(again, plant_subject(bug.sources()) if bug else subject)
    failed = {one.check: one.message for one in found.verdicts if one.verdict == FAIL}
    assert [*failed] == (["saved"] if bug else []), failed
    assert not bug or bug.region in failed["saved"], failed


WRONG_STREAMS = {"not-restored": "", "of-another-rank": "B holds there what A holds as rng.tp0.cp0.dp0.pp0"}
"""Bug -> what is said of it."""


@pytest.mark.parametrize("bug", of_file("tests/checkpoint_streams"), ids=lambda bug: bug.name)
def test_streams_that_are_not_restored_are_seen_by_a_round_trip(tmp_path: Path, bug: Mutant) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    case = CASE.but(dropout=0.1, random="stateful")
    trained(case.but(save=str(a)))
    relaid(case, a, b)
    assert compare(str(a), str(b)).first is None
    planted_module(bug.sources(), "tests.parallel.checkpoints.layouts").relaid(case, a, b)
    first = compare(str(a), str(b)).first
    assert first is not None and first.key.startswith("rng.tp") and WRONG_STREAMS[bug.name] in first.cause, first
