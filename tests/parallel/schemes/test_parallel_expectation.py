"""The closed forms, from formulas alone: counts of whole models, measured bytes of gpt3-857m, laws between cases.

Sources: modes.md 4.3 (counts) and section 5 (bytes that Megatron-LM was measured to send).
"""

from __future__ import annotations

from collections import Counter

import pytest

from parallel.subject import subject
from reference.case import Case

Counts = dict[str, int]


def _counts(case: Case, phase: str) -> Counts:
    """Op -> calls in one phase over the whole run."""
    found: Counter[str] = Counter()
    for term in subject.expected(case):
        if term.phase == phase:
            found[term.op] += term.calls
    return dict(found)


def _bytes(case: Case, phase: str, op: str) -> int:
    return sum(t.calls * t.payload_bytes for t in subject.expected(case) if (t.phase, t.op) == (phase, op))


LAYERS = 5
ONE = f"layers={LAYERS} steps=1 micro=1 tp=4 kv_heads=4"


@pytest.mark.parametrize(
    ("words", "columns"),
    [
        ("", 2),
        ("activation=swiglu", 3),
        ("activation=swiglu fuse_mlp=true", 2),
        ("fuse_qkv=false activation=swiglu", 5),
        ("fuse_qkv=false", 4),
    ],
)
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_counts_of_one_micro_batch(words: str, columns: int, positions: str) -> None:
    text = f"{ONE} positions={positions} {words} recompute=full"
    tp, sp = Case.parse(f"mode=tp {text}"), Case.parse(f"mode=tp-sp {text}")
    assert _counts(tp, "forward") == {"all_reduce": 2 * LAYERS + 1}
    assert _counts(tp, "backward") == {"all_reduce": columns * LAYERS + 1}
    assert _counts(tp, "recompute") == {"all_reduce": 2 * LAYERS}
    forward = {"all_gather": columns * LAYERS + 1, "reduce_scatter": 2 * LAYERS}
    if positions == "learned":
        forward["all_reduce"] = 1
    else:
        forward["reduce_scatter"] += 1
    assert _counts(sp, "forward") == forward
    assert _counts(sp, "backward") == {"all_gather": (columns + 2) * LAYERS + 2, "reduce_scatter": columns * LAYERS + 1}
    assert _counts(sp, "recompute") == {"all_gather": columns * LAYERS, "reduce_scatter": 2 * LAYERS}
    assert _counts(tp, "loss") == _counts(sp, "loss") == {"all_reduce": 3}


@pytest.mark.parametrize("megatron", ["tp", "tp-sp"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("cross_entropy=fused", {"all_reduce": 2}),
        ("label_smoothing=0.1", {"all_reduce": 4}),
        ("label_smoothing=0.1 cross_entropy=fused", {"all_reduce": 2}),
        ("head=gather", {}),
        ("recompute=selective", {"all_reduce": 3}),
    ],
)
def test_the_forms_of_the_loss(megatron: str, words: str, expected: Counts) -> None:
    case = Case.parse(f"mode={megatron} {ONE} {words}")
    assert _counts(case, "loss") == expected
    assert _counts(case, "recompute") == {}


GPT3 = Case.parse("preset=gpt3-857m mode=tp tp=4 dtype=float16 steps=1")
A = 16_777_216


def test_gpt3_857m_sends_what_was_measured_on_megatron() -> None:
    """modes.md section 5: s=2048, b=4, h=1024, tp=4, float16; four micro-batches a global batch of 16."""
    micro = GPT3.micro
    assert micro == 4
    assert _counts(GPT3, "data") == {"broadcast": 20}
    assert _bytes(GPT3, "data", "broadcast") == 17_006_592 * micro == 68_026_368
    assert _counts(GPT3, "forward") == {"all_reduce": 49 * micro}
    assert _bytes(GPT3, "forward", "all_reduce") == 49 * A * micro == 822_083_584 * micro
    assert _counts(GPT3, "loss") == {"all_reduce": 3 * micro}
    assert _bytes(GPT3, "loss", "all_reduce") == 98_304 * micro
    assert _counts(GPT3, "backward") == {"all_reduce": 49 * micro}
    assert _bytes(GPT3, "backward", "all_reduce") == 822_083_584 * micro == 3_288_334_336
    forward_and_loss = [t for t in subject.expected(GPT3) if t.phase in ("forward", "loss")]
    assert sum(t.calls for t in forward_and_loss) == 208
    assert sum(t.calls * t.payload_bytes for t in forward_and_loss) == 3_288_727_552
    assert {t.dtype for t in subject.expected(GPT3) if t.phase == "loss"} == {"float32"}


def test_the_partial_gradients_are_norms_row_biases_and_head_norms() -> None:
    """Under sp: 2 norms a layer and the last one (weight, bias), 2 row biases a layer; q/k norms under both modes."""
    hidden, head_dim, item = 64, 8, 8
    sp, tp = (Case.parse(f"mode={mode} {ONE} qk_norm=true") for mode in ("tp-sp", "tp"))
    head_norms = LAYERS * 4 * head_dim
    shared = {(t.axis, t.payload_bytes) for t in subject.expected(sp) if t.phase == "grad_sync"}
    assert ("tp", item * (LAYERS * 6 * hidden + 2 * hidden + head_norms)) in shared
    shared = {(t.axis, t.payload_bytes) for t in subject.expected(tp) if t.phase == "grad_sync"}
    assert shared == {("tp", item * head_norms), ("tp", item)}
    none = {(t.axis, t.payload_bytes) for t in subject.expected(tp.but(qk_norm=False)) if t.phase == "grad_sync"}
    assert none == {("tp", item)}


def test_terms_grow_with_steps_and_micro_batches_only_where_they_should() -> None:
    once = Case.parse(f"{ONE} dp=2")
    often = once.but(steps=3, micro=5)
    for one, many in zip(subject.expected(once), subject.expected(often), strict=True):
        assert many.calls == one.calls * (3 if one.phase == "grad_sync" else 15)


def test_one_rank_of_tp_expects_its_data_broadcasts_alone() -> None:
    case = Case.parse("mode=tp-sp tp=1 dp=2 steps=1 micro=1")
    found = Counter((t.phase, t.op, t.axis, t.group_size) for t in subject.expected(case) for _ in range(t.calls))
    assert found == {("data", "broadcast", "tp", 1): 5, ("grad_sync", "all_reduce", "dp", 2): 2}
