"""The calls of isp: what ranks issue is the closed form, and the closed form is modes.md's."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest

from parallel.subject import subject
from reference.case import Case

EVO = "mode=isp family=internlm2 vocab=264 heads=4 kv_heads=2 hidden=16 ffn=24 seq=4 steps=1 batch=1"
LINEARS = {2: "fuse_mlp=true", 3: "", 4: "fuse_qkv=false fuse_mlp=true", 5: "fuse_qkv=false"}
"""Column linears a layer -> the words that give them."""


def _per_layer(case: Case) -> dict[tuple[str, str], tuple[int, int]]:
    """(phase, op) -> (calls, bytes) of one layer and micro-batch, the rest of the model left out."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for t in subject.expected(case):
        if t.region.startswith("layers."):
            calls, size = found.get((t.phase, t.op), (0, 0))
            found[(t.phase, t.op)] = (calls + t.calls, size + t.calls * t.payload_bytes)
    runs = case.layers * case.micro * case.steps
    assert all(calls % runs == 0 and size % runs == 0 for calls, size in found.values())
    return {key: (calls // runs, size // runs) for key, (calls, size) in found.items()}


@pytest.mark.parametrize(
    ("columns", "overlap", "recompute"), list(product(LINEARS, (True, False), ("none", "selective", "full")))
)
def test_counts_and_bytes_of_a_layer_are_the_literature_s(columns: int, overlap: bool, recompute: str) -> None:
    """modes.md section 2: weight AG C+2 forward and backward, RS C+2, A2A 3 each way; recompute adds A2A 3 and, without
    overlap, AG C+2. Bytes: Wl = e*[h(h+2*kv*d) + h*h + 3*h*f] and A2A (T/sp)*e*(h + 2*max(kv,sp)*d + h)."""
    words = f"preset=internlm2-7b mode=isp tp=16 wp=8 dp=4 layers=4 dtype=bfloat16 {LINEARS[columns]}"
    case = Case.parse(words).but(overlap=overlap, recompute=recompute)
    h, kv, d, f = 4096, 8, 128, 14336
    weights = (columns + 2, 2 * (h * (h + 2 * kv * d) + h * h + 3 * h * f))
    heads = (3, case.tokens // 16 * 2 * (h + 2 * 16 * d + h))
    expected = {
        ("forward", "all_gather"): weights,
        ("forward", "all_to_all"): heads,
        ("backward", "all_gather"): weights,
        ("backward", "reduce_scatter"): weights,
        ("backward", "all_to_all"): heads,
    }
    if recompute == "full":
        expected[("recompute", "all_to_all")] = heads
        if not overlap:
            expected[("recompute", "all_gather")] = weights
    assert _per_layer(case) == expected
    fused = _per_layer(case.but(fuse_weights=True))
    assert {key: calls for key, (calls, _) in fused.items() if key[1] != "all_to_all"} == {
        ("forward", "all_gather"): 1,
        ("backward", "all_gather"): 1,
        ("backward", "reduce_scatter"): 1,
    }
    assert fused[("backward", "reduce_scatter")][1] == weights[1]


def test_a_bias_costs_three_calls_of_its_length() -> None:
    """modes.md 3.6: one extra AG + AG + RS per biased linear, [out] elements."""
    case = Case.parse(f"{EVO} tp=2 layers=1 micro=1 overlap=false")
    plain, biased = _per_layer(case), _per_layer(case.but(bias=True))
    outputs = 16 + 2 * 2 * 4 + 16 + 24 + 24 + 16
    for key in (("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")):
        assert biased[key] == (plain[key][0] + 5, plain[key][1] + 8 * outputs)


def test_whole_parameters_are_summed_one_by_one_and_shards_once() -> None:
    """modes.md 3.7: 2L+1 norm gradients over wp, uncoalesced; everything in one buffer over wdp."""
    case = Case.parse(f"{EVO} tp=2 dp=2 wp=2 layers=3 qk_norm=true")
    found = Counter(
        (t.axis, t.payload_bytes) for t in subject.expected(case) for _ in range(t.calls) if t.op == "all_reduce"
    )
    assert found[("wp", 16 * 8)] == 2 * 3 + 1
    assert found[("wp", 4 * 8)] == 2 * 3
    split = 2 * 264 * 16 + 3 * (32 * 16 + 16 * 16 + 3 * 24 * 16)
    assert found[("wdp", (split // 2 + 7 * 16 + 6 * 4) * 8)] == 1
    assert sum(calls for (axis, _), calls in found.items() if axis == "wdp") == 1


def test_head_and_embedding_bytes() -> None:
    """modes.md 3.3, 3.4: V*h*e for both tables, (T/sp)*V*e a rank for the exchange, T*V*e for the gather."""
    case = Case.parse(f"{EVO} tp=2 layers=1 micro=1")
    table, tokens = 264 * 16 * 8, case.tokens
    for head, extra in (
        (
            "exchange",
            {("forward", "all_to_all", tokens // 2 * 264 * 8), ("backward", "all_to_all", tokens // 2 * 264 * 8)},
        ),
        ("gather", {("forward", "all_gather", tokens * 264 * 8)}),
        ("local", set()),
    ):
        terms = [t for t in subject.expected(case.but(head=head)) if t.region in ("embedding", "head")]
        sent = Counter((t.region, t.phase, t.op, t.payload_bytes) for t in terms)
        each = {("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")}
        tables = {(region, phase, op, table) for region in ("embedding", "head") for phase, op in each}
        assert set(sent) == tables | {("head", *line) for line in extra}
        assert all(t.calls == 1 for t in terms) and math.prod(sent.values()) == 1
