"""Latent attention and predictions of further tokens: the outcome and the ledger at other layouts, and their calls by
tables.

The tables are Megatron-Core's as measured; that of attention is corrected where its gradient of the rotary keys is
wrong (experts.md 23.2).
"""

import re
from collections import Counter

import pytest
import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.training import truth as dense
from tests.parallel.case_tables import TABLES
from tests.parallel.ranks import CPU, outcome, stated

LATENT, DEPTHS = TABLES["latent"].sizes, TABLES["prediction"].sizes
SMALL = DEPTHS.replace(" prediction_depth=2", "")
KINDS = ("phase", "op", "payload_bytes")
A, Q, V, D = "hidden", "q_lora_rank", "kv_lora_rank", "qk_rope_dim"
JOINED = f"{V}+{D}"
TABLE = {
    ("tp", "duplicated"): [
        *(("forward", "all_reduce", A), ("backward", "all_reduce", V), ("backward", "all_reduce", Q)),
        ("backward", "all_reduce", D),
    ],
    ("tp-sp", "duplicated"): [
        *(("forward", "all_gather", D), ("forward", "all_gather", Q), ("forward", "all_gather", V)),
        *(("forward", "reduce_scatter", A), ("backward", "all_gather", A)),
        *(("backward", "all_gather", V), ("backward", "reduce_scatter", V)),
        *(("backward", "all_gather", Q), ("backward", "reduce_scatter", Q), ("backward", "reduce_scatter", D)),
    ],
    ("tp", "column"): [
        *(("forward", "all_gather", Q), ("forward", "all_gather", JOINED), ("forward", "all_reduce", A)),
        *(("backward", "all_reduce", V), ("backward", "all_reduce", Q), ("backward", "all_reduce", D)),
        *(("backward", "all_reduce", A), ("backward", "all_reduce", A)),
    ],
    ("tp-sp", "column"): [
        *(("forward", "all_gather", A), ("forward", "all_gather", Q), ("forward", "all_gather", A)),
        *(("forward", "all_gather", JOINED), ("forward", "all_gather", Q), ("forward", "all_gather", V)),
        *(("forward", "reduce_scatter", A), ("backward", "all_gather", A)),
        *(("backward", "all_gather", V), ("backward", "all_gather", V)),
        *(("backward", "all_gather", Q), ("backward", "all_gather", Q)),
        *(("backward", "all_gather", A), ("backward", "all_gather", A)),
        *(("backward", "reduce_scatter", V), ("backward", "reduce_scatter", Q)),
        *(("backward", "reduce_scatter", A), ("backward", "reduce_scatter", A), ("backward", "all_reduce", D)),
    ],
}
"""(mode, layout) -> the calls of one attention in one micro-batch, with latent queries: phase, op, features a token."""


@pytest.mark.parametrize(("mode", "down"), TABLE)
def test_one_attention_issues_the_calls_of_the_table(mode: str, down: str) -> None:
    case = Case.parse(f"{LATENT} mode={mode} latent_down={down} q_lora_rank=8 tp=2 micro=1")
    found = stated(case, *KINDS, where=lambda term: re.match(r"layers.1.attention(?!_norm)", term.region) is not None)
    features = {words: sum(getattr(case, word) for word in words.split("+")) for words in (A, Q, V, D, JOINED)}
    assert found == Counter((phase, op, case.tokens * features[what] * 8) for phase, op, what in TABLE[mode, down])


ACTIVATION = 2 * 16 * 16 * 8
"""Bytes of hidden states: batch, seq, hidden, float64."""


def _gradients(words: str) -> dict[str, Tensor]:
    found = dense.subject(Case.parse(f"{SMALL} {words}"), CPU)
    return {name: x for name, x in found.items() if name.startswith("grad/")}


@pytest.mark.parametrize("mode", ["tp", "tp-sp"])
def test_a_depth_issues_the_calls_of_the_table(mode: str) -> None:
    """Megatron-Core as measured (experts.md 24.3), with rotary positions: what one depth adds to a micro-batch."""

    def calls(depth: int) -> Counter[tuple[str, str, int]]:
        case = Case.parse(f"{SMALL} mode={mode} tp=2 micro=1 positions=rope prediction_depth={depth}")
        found = stated(case, *KINDS, where=lambda term: term.phase in ("forward", "backward"))
        return Counter({(*kind, size // ACTIVATION): n for (*kind, size), n in found.items() if size >= ACTIVATION})

    whole = {("forward", "all_reduce", 1): 3, ("forward", "all_gather", 1): 1}
    whole |= {("backward", "all_reduce", 2): 1, ("backward", "all_reduce", 1): 3}
    split = {("forward", "reduce_scatter", 1): 3, ("forward", "all_gather", 2): 1, ("forward", "all_gather", 1): 4}
    split |= {("backward", "all_gather", 1): 7, ("backward", "all_gather", 2): 1}
    split |= {("backward", "reduce_scatter", 1): 3, ("backward", "reduce_scatter", 2): 1}
    assert calls(2) - calls(1) == Counter(whole if mode == "tp" else split)


def test_one_global_batch_is_one_step_however_it_is_grouped() -> None:
    """Masks differ in every micro-batch, so that a mean of one rank's or micro-batch's means would be wrong."""
    alone = outcome(f"{DEPTHS} mode=tp tp=1 dp=1 micro=4 positions=rope steps=2")
    for grouping in ("mode=tp tp=2 dp=2 micro=2", "mode=tp-sp tp=4 dp=4 micro=1", "mode=tp-sp tp=2 micro=4 pp=2"):
        found = outcome(f"{DEPTHS} {grouping} positions=rope steps=2")
        kept = [name for name in alone if name.split("/")[0] in ("grad", "param", "loss", "tokens", "grad_norm")]
        far = {name: float((found[name] - alone[name]).abs().max()) for name in kept}
        assert max(far.values()) < 1e-10, (grouping, max(far, key=far.__getitem__))


def test_no_depth_is_no_prediction_and_no_weight_changes_no_gradient_of_the_model() -> None:
    plain, unweighed = _gradients(""), _gradients("prediction_depth=2 prediction_weight=0")
    assert {name for name in unweighed if name not in plain} == {name for name in unweighed if "prediction" in name}
    assert all(torch.equal(unweighed[name], value) for name, value in plain.items())
    assert all(not value.any() for name, value in unweighed.items() if name not in plain)
    assert Case.parse(f"{SMALL} prediction_depth=0") == Case.parse(SMALL)
