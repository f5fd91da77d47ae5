"""Planted bugs of checkpoints: each is killed, with the right first place.

A load is held against the dense model, which begins with the same files; a save against what the ranks hold; states of
random streams, which no dense model knows, by a round trip.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bugs.planting import planted, planted_module, replaced
from harness.checking.evidence import FAIL, PASS
from parallel.checkpoints.comparing import compare
from parallel.subject import subject
from reference.case import Case
from suites.session.prover import Prover
from tests.parallel.checkpoints.layouts import relaid, trained

MODEL = "layers=1 heads=6 kv_heads=6 hidden=24 ffn=42 vocab=389 seq=8 batch=2 micro=3 lr=0.01 optimizer=adamw"
CASE = Case.parse(f"{MODEL} activation=swiglu fuse_mlp=true mode=tp tp=2 steps=1")
LOADING, STATE = "parallel.checkpoints.loading", "parallel.checkpoints.state"
SAVING = "parallel.checkpoints.saving"
_COPIED = "            target.local.copy_(tensor)\n"
_BOXES = "return pieces(local, self.place, at)"
_CUT_ANEW = (
    "return pieces(local, self.place if {key!r} not in self.key else Placement(shape=self.place.shape, cuts=tuple("
    "__import__('dataclasses').replace(cut, unit=1, blocks={blocks}) for cut in self.place.cuts)), at)"
)
MUTANTS = {
    "a tensor keeps what it had (strict off, CK1)": (
        LOADING,
        _COPIED,
        f"            if 'mlp.w13.weight' not in target.key:\n    {_COPIED}",
        "forward",
    ),
    "qkv cut as three thirds": (
        STATE,
        _BOXES,
        _CUT_ANEW.format(key="wqkv", blocks="(self.place.shape[0] // 3,) * 3"),
        "forward",
    ),
    "gate and up cut as one block (w13)": (STATE, _BOXES, _CUT_ANEW.format(key="w13", blocks="()"), "forward"),
    "one bias of two ranks": (STATE, _BOXES, "return pieces(local, self.place, {**at, 'tp': (0, 2)})", "forward"),
    "moments left out": (LOADING, "in states.items():\n        optimizer", "in ():\n        optimizer", "step"),
    "a stale count of steps": (
        LOADING,
        "optimizer.state[rank.updated[name]] = state",
        "optimizer.state[rank.updated[name]] = {**state, 'step': torch.zeros(())}",
        "step",
    ),
    "both moments from one key": (
        STATE,
        'key = f"optimizer.state.{name}.{moment}"',
        'key = f"optimizer.state.{name}.{MOMENTS[0]}"',
        "step",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("mutants") / "saved")
    trained(CASE.but(save=folder))
    return folder


def test_the_right_load_passes(prover: Prover, saved: str) -> None:
    assert not [one for one in prover.proof(CASE.but(load=saved), subject).verdicts if one.verdict == FAIL]


@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_killed(prover: Prover, saved: str, name: str) -> None:
    module, old, new, phase = MUTANTS[name]
    found = prover.proof(CASE.but(load=saved), planted(replaced(module, old, new)))
    failed = [one.message for one in found.verdicts if one.verdict == FAIL]
    assert failed and any(f"phase {phase}" in message for message in failed), failed


_WRITTEN = "target.boxes(target.local.detach(), rank.mesh.coordinates)"
SCALED = Case.parse(
    "mode=tp tp=2 layers=1 heads=2 hidden=8 vocab=32 seq=4 steps=2 dtype=float16 master=float32 scaler=dynamic "
    "loss_scale=8"
)
_FLAT = f"{MODEL} activation=swiglu fuse_mlp=true mode=tp tp=1 dp=2 zero=1 bucket=700 steps=1"
WRONG_SAVES = {
    "gate and up exchanged (their right load undoes nothing)": (
        CASE,
        "(target.boxes(target.local.detach().roll(len(target.local) // 2, 0), rank.mesh.coordinates)"
        f" if '0.mlp.w13.weight' in target.key and target.local.dim() else {_WRITTEN})",
        "saved/param/layers.0.mlp.w13.weight",
    ),
    "rows of the padded vocabulary kept": (
        CASE,
        "((Box(local=target.local.detach(), offsets=(rank.mesh.rank * len(target.local), 0),"
        " global_shape=(rank.case.padded_vocab, 24)),) if target.key == 'model.embedding.tokens.weight'"
        f" else {_WRITTEN})",
        "saved/param/embedding.tokens.weight",
    ),
    "padding of buckets taken for data (PR #5077)": (
        Case.parse(_FLAT),
        "target.boxes(target.local.detach().roll(3 * ('layers.0.attention.wo' in target.key and 'exp' in target.key)),"
        " rank.mesh.coordinates)",
        "saved/exp_avg_after/0/layers.0.attention.wo.weight",
    ),
    "one moment for both": (
        CASE,
        "target.boxes((states[target.key.split('state.')[1].rpartition('.')[0]]['exp_avg'] if target.key.endswith"
        "('layers.0.mlp.w2.weight.exp_avg_sq') else target.local).detach(), rank.mesh.coordinates)",
        "saved/exp_avg_sq_after/0/layers.0.mlp.w2.weight",
    ),
    "a count of steps from nothing (SkyRL #1403)": (
        CASE,
        "target.boxes(target.local.detach() * (not target.key.endswith('w2.weight.step')), rank.mesh.coordinates)",
        "saved/step_after/0/layers.0.mlp.w2.weight",
    ),
}
WRONG_COUNTS = {
    "one step too few": ("torch.tensor(steps, device", "torch.tensor(steps - 1, device", "saved/steps"),
    "the first loss scale": (
        "rank.step.loss_scale.state}",
        "torch.tensor([rank.case.loss_scale, 0, 2], dtype=torch.float64)}",
        "saved/loss_scale",
    ),
}


def test_the_right_save_passes(prover: Prover, tmp_path: Path) -> None:
    found = {one.check: one for one in prover.proof(CASE.but(save=str(tmp_path / "a")), subject).verdicts}
    assert found["saved"].verdict == PASS and found["saved"].message.startswith("65 tensors of the checkpoint")


@pytest.mark.parametrize("name", WRONG_SAVES)
def test_a_wrong_save_is_seen_where_it_is_written(prover: Prover, tmp_path: Path, name: str) -> None:
    case, new, place = WRONG_SAVES[name]
    found = prover.proof(case.but(save=str(tmp_path / "a")), planted(replaced(SAVING, _WRITTEN, new)))
    failed = {one.check: one.message for one in found.verdicts if one.verdict == FAIL}
    assert failed.keys() & {"saved", "merge"} and not failed.keys() - {"saved", "merge", "coverage"}, failed
    assert not name.startswith(("gate and up", "one moment", "a count")) or [*failed] == [
        "saved"
    ]  # which no other check kills
    first = next(message for check, message in failed.items() if check != "coverage")
    assert place in first and "phase checkpoint" in first, failed


@pytest.mark.parametrize("name", WRONG_COUNTS)
def test_a_wrong_count_is_seen_where_it_is_written(prover: Prover, tmp_path: Path, name: str) -> None:
    old, new, place = WRONG_COUNTS[name]
    case = SCALED.but(save=str(tmp_path / "a"))
    found = prover.proof(case, planted(replaced(SAVING, old, new)))
    failed = {one.check: one.message for one in found.verdicts if one.verdict == FAIL}
    assert [*failed] == ["saved"] and place in failed["saved"], failed


STREAMS = "{stream: common[key] for stream, key in rng_keys(rank).items()}"
WRONG_STREAMS = {
    "not restored": (LOADING, f"rank.dropout.streams.load_state_dict({STREAMS})", "pass", ""),
    "of another rank (PR #6858)": (
        LOADING,
        STREAMS,
        "{stream: stored.full(key.replace('tp1', 'tp0')) for stream, key in rng_keys(rank).items()}",
        "B holds there what A holds as rng.tp0.cp0.dp0.pp0",
    ),
}


@pytest.mark.parametrize("name", WRONG_STREAMS)
def test_streams_that_are_not_restored_are_seen_by_a_round_trip(tmp_path: Path, name: str) -> None:
    module, old, new, cause = WRONG_STREAMS[name]
    a, b = tmp_path / "a", tmp_path / "b"
    case = CASE.but(dropout=0.1, random="stateful")
    trained(case.but(save=str(a)))
    relaid(case, a, b)
    assert compare(str(a), str(b)).first is None
    planted_module(replaced(module, old, new), "tests.parallel.checkpoints.layouts").relaid(case, a, b)
    first = compare(str(a), str(b)).first
    assert first is not None and first.key.startswith("rng.tp") and cause in first.cause, first
