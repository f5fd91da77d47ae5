"""Planted bugs of a load: each is killed by the checks of the case that loads, with the right first phase."""

from __future__ import annotations

import pytest

from harness.checking.evidence import FAIL
from parallel.subject import subject
from reference.case import Case
from suites.mutants.planting import planted, replaced
from suites.session.prover import Prover
from tests.parallel.checkpoints.layouts import trained

MODEL = "layers=1 heads=6 kv_heads=6 hidden=24 ffn=42 vocab=389 seq=8 batch=2 micro=3 lr=0.01 optimizer=adamw"
CASE = Case.parse(f"{MODEL} activation=swiglu fuse_mlp=true mode=tp tp=2 steps=1")
LOADING, STATE = "parallel.checkpoints.loading", "parallel.checkpoints.state"
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
