"""Latent attention: the outcome and the ledger of every layout, its calls by the published table, its rotary keys.

The table is Megatron-Core's as measured, corrected where its gradient of the rotary keys is wrong (experts.md 23.2).
"""

from collections import Counter

import pytest

from harness.engines.threads.inproc import InprocEngine
from harness.running.proof import prove
from parallel.subject import subject
from reference.case import Case

SIZES = (
    "layers=2 hidden=16 heads=4 kv_heads=4 ffn=32 vocab=67 seq=16 positions=rope lr=0.1 "
    "kv_lora_rank=12 qk_head_dim=6 v_head_dim=10"
)
LAYOUTS = [
    f"mode={mode} latent_down={down} q_lora_rank={queries}"
    for mode in ("tp", "tp-sp")
    for down in ("duplicated", "column")
    for queries in (0, 8)
]
SOME = (LAYOUTS[0], LAYOUTS[3], LAYOUTS[5], LAYOUTS[6])
WITH = ("pp=2 dp=2 zero=1 bucket=500", "dp=2 zero=3", "cp=2", "packed=true delivery=local")
"""Words of other features for some of the layouts."""
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


@pytest.mark.parametrize(("layout", "more"), list(zip(SOME, WITH, strict=True)))
def test_every_layout_is_right_and_so_is_its_ledger(layout: str, more: str, engine: InprocEngine) -> None:
    result = prove(Case.parse(f"{SIZES} {layout} tp=2 {more}"), subject, engine)
    assert result.verdict == "pass", [verdict.message for verdict in result.verdicts if verdict.verdict != "pass"]


@pytest.mark.parametrize(("mode", "down"), TABLE)
def test_one_attention_issues_the_calls_of_the_table(mode: str, down: str) -> None:
    case = Case.parse(f"{SIZES} mode={mode} latent_down={down} q_lora_rank=8 tp=2 micro=1 steps=1")
    stated: Counter[tuple[str, str, int]] = Counter()
    for term in subject.expected(case):
        if term.region.startswith("layers.1.attention") and not term.region.endswith("attention_norm"):
            stated[term.phase, term.op, term.payload_bytes] += term.calls
    features = {words: sum(getattr(case, word) for word in words.split("+")) for words in (A, Q, V, D, JOINED)}
    assert stated == Counter((phase, op, case.tokens * features[what] * 8) for phase, op, what in TABLE[mode, down])
