"""Context parallelism against the dense model over three steps, its ledger against the closed form, and regrouping."""

from __future__ import annotations

import pytest
from torch import Tensor

from harness.checking.evidence import PASS
from harness.engines.threads.inproc import InprocEngine
from harness.outcome.merging import merge
from harness.running.proof import CaseResult
from harness.running.ranks.execution import execute
from parallel.subject import subject
from reference.case import Case
from reference.case.context import METHODS, ORDERS
from suites.session.prover import Prover

SIZES = "layers=2 heads=12 kv_heads=6 hidden=48 ffn=42 vocab=390 batch=2 micro=3 steps=3 lr=0.1"
PACKED = "family=internlm2 packed=true qk_norm=true"
CASES = (
    "tp=2 cp=2 seq=12 order=cp-tp",
    "tp=1 cp=3 seq=12 family=llama delivery=flat recompute=selective",
    f"mode=tp-sp tp=2 cp=2 seq=8 delivery=local {PACKED} cp_comm=gather bias=true",
    "tp=1 dp=2 cp=4 seq=8 order=dp-cp steps=2 cp_slices=contiguous delivery=local",
    f"mode=tp-sp tp=2 pp=2 cp=2 seq=8 order=pp-cp-tp micro=4 delivery=local {PACKED}",
    f"mode=isp tp=2 wp=2 cp=2 seq=8 {PACKED} recompute=full overlap=false",
    "tp=1 cp=4 seq=16 cp_comm=alltoall-ring cp_inner=2 kv_heads=2 attention_mask=false",
    "mode=tp-sp tp=3 cp=2 seq=12 cp_comm=alltoall heads=12 kv_heads=3 zero=1 bucket=900 ffn=30 vocab=390",
)
DEEP = tuple(
    f"mode={mode} tp=2 dp={dp} cp={cp} seq={4 * cp} cp_comm={comm} cp_slices={order} recompute={recompute} "
    f"heads=24 kv_heads=12 {words}"
    for number, (mode, words) in enumerate(
        (
            ("tp", "delivery=flat"),
            ("tp-sp", "delivery=local " + PACKED),
            ("mtp", "tied=false embedding=hidden"),
            ("msp", PACKED),
            ("fsp", "label_smoothing=0.1"),
            ("isp", "wp=2 head=gather " + PACKED),
        )
    )
    for comm in METHODS[:3]
    for order in ORDERS
    for dp, cp, recompute in ((((1, 3, "full"), (2, 2, "selective"), (1, 2, "none"))[number % 3]),)
) + tuple(
    f"mode={mode} tp=1 cp={cp} seq={4 * cp} cp_comm=alltoall-ring cp_inner={inner} {words}"
    for mode, cp, inner, words in (
        ("tp", 6, 3, "recompute=selective"),
        ("tp-sp", 6, 2, PACKED + " delivery=local"),
        ("isp", 4, 2, "wp=1"),
    )
)


def proved(prover: Prover, words: str) -> CaseResult:
    result = prover.proof(Case.parse(f"{SIZES} {words}"), subject)
    assert [verdict.message for verdict in result.verdicts if verdict.verdict != PASS] == []
    return result


@pytest.mark.parametrize("words", CASES)
def test_training_is_the_dense_models_and_every_byte_is_stated(prover: Prover, words: str) -> None:
    checks = {verdict.check for verdict in proved(prover, words).verdicts}
    assert {"ledger", "activations", "activation_gradients", "parameter_gradients", "gradient_norm"} <= checks
    ring = "cp_comm" not in words or "alltoall-ring" in words
    assert "overlap" in checks or not ring or "overlap=false" in words


@pytest.mark.parametrize("words", DEEP)
def test_in_every_form(prover: Prover, request: pytest.FixtureRequest, words: str) -> None:
    if request.config.getoption("hypothesis_profile", None) != "deep":
        pytest.skip("minutes of CPU time in all: --hypothesis-profile deep")
    proved(prover, words)


GROUPINGS = ((1, 4, 4, 2), (4, 2, 1, 1), (2, 2, 2, 2))
"""dp, cp, micro and pp of the same global batch; 8 ranks."""


def _outcome(dp: int, cp: int, micro: int, pp: int) -> dict[str, Tensor]:
    case = Case.parse(
        f"{SIZES} tp=1 dp={dp} cp={cp} pp={pp} micro={micro} steps=2 seq=16 {PACKED} delivery=local label_smoothing=0.1"
    )
    with InprocEngine() as engine:
        run = execute(case, subject, engine, text="", record=False)
    return {name: value for name, value in merge(run.outcomes).tensors.items() if not name.startswith("act")}


def test_one_global_batch_is_one_step_however_it_is_grouped() -> None:
    """Over data ranks, context ranks, stages and micro-batches, with other numbers of valid tokens in each of them."""
    alone = _outcome(1, 1, 4, 1)
    assert {"loss/1", "tokens/1", "grad_norm/1", "logits/1"} <= alone.keys()
    for grouping in GROUPINGS:
        found = _outcome(*grouping)
        assert found.keys() == alone.keys()
        far = {
            name: float((value - alone[name]).abs().max() / alone[name].abs().max().clamp(min=1e-9))
            for name, value in found.items()
            if "logits" not in name  # their rows are numbered by data rank
        }
        assert max(far.values()) < 1e-10, (grouping, max(far, key=far.__getitem__))
