"""The closed forms, from formulas alone: counts of whole models, measured bytes of gpt3-857m, laws between cases.

The mode autotp, and Megatron's own counts and calls beside ours.

Sources: modes.md 4.3 (counts), 8.2 and section 5 (bytes that Megatron-LM was measured to send).
"""

import math
from collections import Counter

import pytest
import torch

from parallel.communication.layout import gather, meshgrid, shard
from parallel.data_parallel.megatron import estimated_mb
from parallel.registry import scheme_of
from parallel.slicing.held import widths
from parallel.slicing.slices import slices
from parallel.slicing.words import Sliced
from parallel.subject import subject
from reference.case import Case
from reference.model.parameters import full, shapes
from tests.parallel.case_tables import UNEVEN

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


MODE = scheme_of("autotp")


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_rank_holds_what_the_slices_say(tp: int, family: str) -> None:
    """The mode and `shardproof slice` are one rule: the same rows and columns of the same weights."""
    case = Case.parse(f"{UNEVEN.sizes} tp={tp} family={family} tied=false fuse_qkv=false head=sum")
    names = {"wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj"}
    if family == "opt":
        names |= {"wo": "self_attn.out_proj", "w1": "fc1", "w2": "fc2"}
    else:
        names |= {"wo": "self_attn.o_proj", "w1": "mlp.gate_proj", "w3": "mlp.up_proj", "w2": "mlp.down_proj"}
    words = f"family={family} hidden=40 heads=10 kv_heads=5 ffn=37 vocab=67 tp={tp} path=autotp head=sum"
    made = {one.name: one.place for one in slices(Sliced.parse(words))}
    places = MODE.placements(case)
    assert places["head.weight"] == made["lm_head.weight"]
    for ours, theirs in names.items():
        room = "attention" if theirs.startswith("self_attn") else "mlp"
        assert places[f"layers.1.{room}.{ours}.weight"] == made[f"{theirs}.weight"], ours
        if case.bias:
            assert places[f"layers.1.{room}.{ours}.bias"] == made[f"{theirs}.bias"], ours


def test_opt_125m_on_five_ranks() -> None:
    """Real shapes: 12 heads as 3 3 2 2 2, and fc1's 3072 features in proportion; every parameter survives the cut."""
    case = Case.parse("preset=opt-125m mode=autotp tp=5 layers=1 fuse_qkv=false seq=16")
    places = MODE.placements(case)
    assert widths(places["layers.0.attention.wq.weight"].cuts[0].held) == (192, 192, 128, 128, 128)
    assert widths(places["layers.0.mlp.w1.weight"].cuts[0].held) == (768, 768, 512, 512, 512)
    assert places["embedding.tokens.weight"].shape == (50272, 768) and not places["embedding.tokens.weight"].cuts
    for name in [name for name in shapes(case) if name.startswith("layers.")]:
        value = full(case, name)
        locals_ = [(at, shard(value, places[name], at)) for at in meshgrid({"tp": 5})]
        assert torch.equal(gather(locals_, places[name]), value), name


def test_calls_are_deepspeed_s() -> None:
    """modes.md 8.2: all-reduces of each column in backward, of each row in forward; the head's logits; nothing else."""
    words = "preset=opt-125m mode=autotp tp=4 steps=1 micro=1 dtype=bfloat16 fuse_qkv=false"
    for form, head in {
        "": {},
        "tied=false": {("forward", "all_gather"): 1, ("backward", "all_reduce"): 1},
        "tied=false head=sum": {("forward", "all_reduce"): 1, ("backward", "all_reduce"): 1},
        "head=sum": {("forward", "all_reduce"): 1, ("backward", "all_reduce"): 2},
    }.items():
        case = Case.parse(f"{words} {form}")
        found: Counter[tuple[str, str]] = Counter()
        outside: Counter[tuple[str, str]] = Counter()
        for term in subject.expected(case):
            if term.region.startswith("layers."):
                assert term.payload_bytes == case.tokens * 768 * 2
                found[term.phase, term.op] += term.calls
            elif term.phase in ("forward", "backward", "loss"):
                assert term.region == "head"
                outside[term.phase, term.op] += term.calls
        assert found == {("forward", "all_reduce"): 2 * 12, ("backward", "all_reduce"): 4 * 12}
        assert outside == head


PUBLISHED = "preset=gpt3-857m mode=tp tp=4 seq=2048 batch=4 micro=4 dtype=float16"


def test_the_numbers_of_the_published_run() -> None:
    told = dict(subject.beside(Case.parse(PUBLISHED)))
    replicated = 24 * (4 * 1024 + 2 * 1024) + 2 * 1024 + 2048 * 1024  # norms, biases of rows, last norm, positions
    split = 24 * (12 * 1024**2 + 3 * 1024 + 4 * 1024) + 50688 * 1024
    assert told["parameters of a rank"] == f"{replicated + split // 4:,}" == "90,763,264"
    assert told["parameters of the model"] == f"{replicated + split:,}" == "356,313,088"
    assert told["weights and optimizer of a rank by Megatron-LM's own estimate"] == "1,519.18 MB"
    activation, token = 4 * 2048 * 1024 * 2, 4 * 2048
    for phase, calls in {
        "data": f"5 broadcast of {3 * 8 * token + 4 * token + 4 * 2048**2:,} B together",
        "forward": f"49 all_reduce of {49 * activation:,} B together",
        "loss": f"3 all_reduce of {3 * 4 * token:,} B together",
        "backward": f"49 all_reduce of {49 * activation:,} B together",
    }.items():
        assert told[f"our ledger, a micro-batch: {phase}"] == calls
    assert told["our ledger, a step: grad_sync"] == "1 all_reduce of 4 B together"
    assert told["Megatron's step: gradients"] == "all_reduce of 181,526,528 B float16 over a group of one"


def test_the_calls_of_a_step_are_those_that_were_measured() -> None:
    """404 all-reduces of four micro-batches and five of the step over four ranks, two over groups of one."""
    case = Case.parse(f"{PUBLISHED} steps=1")
    ours = Counter(term.op for term in subject.expected(case) for _ in range(term.calls))
    calls = [value for what, value in subject.beside(case) if what.startswith("Megatron's step")]
    alone = [value for value in calls if value.endswith("a group of one")]
    assert (ours["all_reduce"] + len(calls) - len(alone), len(alone)) == (404 + 5, 2)
    scaled = Case.parse(f"{PUBLISHED} steps=1 master=float32 scaler=dynamic")
    found = sum(
        term.calls for term in subject.expected(scaled) if term.reduce_op == "max" and term.phase == "grad_sync"
    )
    assert found == 1
    assert not [what for what, _ in subject.beside(scaled) if "infinite" in what]


@pytest.mark.parametrize(("words", "bytes_of_one"), [("dp=8", 18.0), ("dp=8 zero=1", 6 + 12 / 8)])
def test_a_distributed_optimizer_shares_twelve_bytes(words: str, bytes_of_one: float) -> None:
    case = Case.parse(f"{PUBLISHED} {words}")
    counted = 24 * (12 * 1024**2 + 4 * 1024) + 2 * 1024 + 50688 * 1024
    assert math.isclose(estimated_mb(case), counted / 4 * bytes_of_one / 2**20)


def test_other_systems_have_no_such_lines() -> None:
    assert not [*subject.beside(Case.parse("preset=tiny-internlm2 mode=isp"))]
