"""Dropout in every mode and scheme: the dense model with the same masks; masks that depend on no layout."""

from __future__ import annotations

import pytest
import torch

from harness.checking.evidence import PASS
from harness.engines.threads.inproc import InprocEngine
from harness.outcome.merging import merge
from harness.running.ranks.execution import execute
from parallel.subject import subject
from reference.case import Case
from reference.training.subject import subject as dense
from suites.session.prover import Prover

SIZES = "heads=12 kv_heads=6 hidden=24 ffn=36 vocab=390 seq=12 batch=2 micro=3 steps=2 lr=0.1 dropout=0.2 "
SIZES += "attention_dropout=0.3 delivery=local"
CASES = (
    "mode=tp-sp tp=2 pp=2 recompute=full random=stateful",
    "mode=isp tp=2 wp=2 recompute=full fuse_weights=true random=stateful",
    "mode=isp tp=2 cp=2 family=internlm2 packed=true micro=2 recompute=selective random=stateful",
)
MODES = ("tp", "tp-sp", "mtp", "msp", "fsp", "isp", "autotp")
DEEP = tuple(f"mode={mode} tp=3 dp=2 random={random}" for mode in MODES for random in ("field", "stateful")) + tuple(
    f"{words} random={random}"
    for random in ("field", "stateful")
    for words in (
        "mode=tp-sp tp=2 dp=3 recompute=selective",
        "mode=tp tp=1 cp=4 cp_comm=alltoall-ring cp_inner=2 kv_heads=4 seq=16 dtype=bfloat16 lr=0.01",
        "mode=tp tp=1 cp=3 cp_comm=gather recompute=selective",
        "mode=tp-sp tp=2 cp=2 kv_heads=4 cp_comm=alltoall cp_slices=contiguous recompute=full",
        "mode=tp tp=1 pp=2 schedule=gpipe micro=4",
        "mode=tp-sp tp=2 dp=2 zero=1 bucket=900 optimizer=adamw lr=0.01",
        "mode=tp tp=1 dp=3 zero=2",
        "mode=tp tp=2 recompute=full early_stop=true",
        "mode=tp-sp tp=2 pp=2 schedule=interleaved chunks=2 layers=4 micro=4 recompute=full",
        "mode=tp tp=1 dp=3 zero=3 recompute=full",
        "mode=msp tp=2 family=internlm2 packed=true recompute=selective",
        "mode=tp-sp tp=2 family=opt dtype=float32",
    )
)


def proved(prover: Prover, words: str) -> set[str]:
    """The joint masks that a case was proved with, by name; every check must pass."""
    result = prover.proof(Case.parse(f"{SIZES} {words}"), subject)
    assert [verdict.message for verdict in result.verdicts if verdict.verdict != PASS] == []
    assert result.evidence is not None
    assert "masks" in {verdict.check for verdict in result.verdicts}
    return {name for name in result.evidence.merged.tensors if name.startswith("mask/")}


@pytest.mark.parametrize("words", CASES)
def test_numbers_are_the_dense_models_with_the_joint_masks(prover: Prover, words: str) -> None:
    assert len(proved(prover, words)) == 2 * (1 + 2 * 3)  # steps, and the sites of two layers


@pytest.mark.parametrize("words", DEEP)
def test_numbers_are_the_dense_models_in_every_mode(prover: Prover, words: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("hypothesis_profile", None) != "deep":
        pytest.skip("two CPU minutes in all: --hypothesis-profile deep")
    proved(prover, words)


@pytest.mark.parametrize("words", ["mode=tp-sp tp=2 pp=2 dp=1 micro=12 recompute=full", "tp=1 cp=2 micro=6 dp=2"])
def test_the_fields_masks_depend_on_no_layout_and_on_no_schedule(words: str) -> None:
    """The dense model states them, and so does any way to run the same global batch."""
    case = Case.parse(f"{SIZES} {words} steps=1")
    found = merge(execute(case, subject, InprocEngine(), text=str(case)).outcomes).tensors
    right = dense(case.but(mode="tp", tp=1, pp=1, cp=1, dp=3, micro=4, recompute="none"), torch.device("cpu"))
    masks = {name: mask for name, mask in right.items() if name.startswith("mask/")}
    assert {name for name in found if name.startswith("mask/")} == masks.keys()
    assert all(torch.equal(found[name], mask) for name, mask in masks.items())


def test_words_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="random=stateful: is where masks come from"):
        Case.parse("random=stateful")
    with pytest.raises(ValueError, match=r"attention_dropout=1.0: must lie in \[0, 1\)"):
        Case.parse("attention_dropout=1")
