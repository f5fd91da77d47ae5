"""Prediction of further tokens: against the dense model, at its limits, and however the same batch is grouped."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.engines.threads.inproc import InprocEngine
from harness.outcome.merging import merge
from harness.running.proof import prove
from harness.running.ranks.execution import execute
from parallel.subject import subject
from reference.case import Case
from reference.data.batches import Batch, micro_batch
from reference.model.branches.prediction import ahead
from reference.training import subject as dense
from tests.parallel.ranks import CPU

SIZES = "layers=2 hidden=16 heads=4 kv_heads=4 ffn=32 vocab=67 seq=16 lr=0.1"
DEPTHS = f"{SIZES} prediction_depth=2"
PROVED = (
    "mode=tp tp=2 steps=3 dp=2",
    "mode=tp-sp tp=2 pp=2 positions=rope tied=false schedule=interleaved chunks=2 layers=4",
    "mode=tp tp=2 recompute=full dropout=0.1 attention_dropout=0.1",
    "mode=tp tp=2 cp=2 packed=true positions=rope delivery=local dp=2",
    "mode=tp-sp tp=2 kv_lora_rank=12 q_lora_rank=8 positions=rope latent_down=column pp=2",
)
GROUPINGS = ((2, 2, 2, 1), (4, 4, 1, 1), (2, 1, 4, 2))
"""tp, dp, micro and pp of the same global batch."""
ACTIVATION = 2 * 16 * 16 * 8
"""Bytes of hidden states: batch, seq, hidden, float64."""


def _outcome(text: str) -> dict[str, Tensor]:
    case = Case.parse(text)
    with InprocEngine() as engine:
        merged = merge(execute(case, subject, engine, text="", record=False).outcomes)
    assert merged.flaws == ()
    return dict(merged.tensors)


def _gradients(words: str, *, of: str = "") -> dict[str, Tensor]:
    found = dense.subject(Case.parse(f"{SIZES} steps=1 {words}"), CPU)
    return {name: x for name, x in found.items() if name.startswith("grad/") and of in name}


@pytest.mark.parametrize("words", PROVED)
def test_it_is_right_and_so_is_its_ledger(words: str, engine: InprocEngine) -> None:
    result = prove(Case.parse(f"{DEPTHS} {words}"), subject, engine)
    assert result.verdict == "pass", [verdict.message for verdict in result.verdicts if verdict.verdict != "pass"]


@pytest.mark.parametrize("mode", ["tp", "tp-sp"])
def test_a_depth_issues_the_calls_of_the_table(mode: str) -> None:
    """Megatron-Core as measured (experts.md 24.3), with rotary positions: what one depth adds to a micro-batch."""

    def calls(depth: int) -> Counter[tuple[str, str, int]]:
        case = Case.parse(f"{SIZES} mode={mode} tp=2 micro=1 steps=1 positions=rope prediction_depth={depth}")
        found: Counter[tuple[str, str, int]] = Counter()
        for term in subject.expected(case):
            if term.phase in ("forward", "backward") and term.payload_bytes >= ACTIVATION:
                found[term.phase, term.op, term.payload_bytes // ACTIVATION] += term.calls
        return found

    whole = {("forward", "all_reduce", 1): 3, ("forward", "all_gather", 1): 1}
    whole |= {("backward", "all_reduce", 2): 1, ("backward", "all_reduce", 1): 3}
    split = {("forward", "reduce_scatter", 1): 3, ("forward", "all_gather", 2): 1, ("forward", "all_gather", 1): 4}
    split |= {("backward", "all_gather", 1): 7, ("backward", "all_gather", 2): 1}
    split |= {("backward", "reduce_scatter", 1): 3, ("backward", "reduce_scatter", 2): 1}
    assert calls(2) - calls(1) == Counter(whole if mode == "tp" else split)


def test_one_global_batch_is_one_step_however_it_is_grouped() -> None:
    """Masks differ in every micro-batch, so that counts of one rank or micro-batch are no shares of all."""
    alone = _outcome(f"{DEPTHS} mode=tp tp=1 dp=1 micro=4 positions=rope steps=2")
    for mode in ("tp", "tp-sp"):
        for tp, dp, micro, pp in GROUPINGS:
            found = _outcome(f"{DEPTHS} mode={mode} tp={tp} dp={dp} micro={micro} pp={pp} positions=rope steps=2")
            kept = [name for name in alone if name.split("/")[0] in ("grad", "param", "loss", "tokens", "grad_norm")]
            far = {name: float((found[name] - alone[name]).abs().max()) for name in kept}
            assert max(far.values()) < 1e-10, (mode, tp, dp, micro, pp, max(far, key=far.__getitem__))


def test_no_depth_is_no_prediction_and_no_weight_changes_no_gradient_of_the_model() -> None:
    plain, unweighed = _gradients(""), _gradients("prediction_depth=2 prediction_weight=0")
    assert {name for name in unweighed if name not in plain} == {name for name in unweighed if "prediction" in name}
    assert all(torch.equal(unweighed[name], value) for name, value in plain.items())
    assert all(not value.any() for name, value in unweighed.items() if name not in plain)
    assert Case.parse(f"{SIZES} prediction_depth=0") == Case.parse(SIZES)
    ours = [
        _outcome(f"{SIZES} mode=tp-sp tp=2 steps=1 {words}") for words in ("", "prediction_depth=2 prediction_weight=0")
    ]
    assert all(torch.equal(ours[1][name], value) for name, value in ours[0].items() if name.startswith("grad/"))


def test_gradients_are_linear_in_the_weight() -> None:
    none, one, three = (_gradients(f"prediction_depth=2 prediction_weight={weight}") for weight in (0, 0.5, 1.5))
    for name, value in none.items():
        further = three[name] - value
        assert float((further - 3 * (one[name] - value)).abs().max()) <= 1e-12 * float(three[name].abs().max())
    assert float((one["grad/embedding.tokens.weight"] - none["grad/embedding.tokens.weight"]).abs().max()) > 1e-3


def test_a_document_ends_where_it_ends() -> None:
    """Two documents of 3 and 2 tokens: by hand."""
    case = Case.parse("family=internlm2 mode=mtp packed=true batch=1 seq=5 vocab=512 tp=2")
    batch: Batch = replace(
        micro_batch(case, 0, 0, 0),
        tokens=torch.tensor([[11, 12, 13, 21, 22]]),
        labels=torch.tensor([[12, 13, -100, 22, 23]]),
        loss_mask=torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]]),
        positions=torch.tensor([[0, 1, 2, 0, 1]]),
        cu_seqlens=torch.tensor([0, 3, 5]),
    )
    once, twice = ahead(batch, 1), ahead(batch, 2)
    assert once.tokens.tolist() == [[12, 13, 0, 22, 0]] and twice.tokens.tolist() == [[13, 0, 0, 0, 0]]
    assert once.labels.tolist() == [[13, -100, -100, 23, -100]] and once.loss_mask.tolist() == [[1, 0, 0, 1, 0]]
    assert once.positions.tolist() == [[1, 2, 0, 1, 0]]
