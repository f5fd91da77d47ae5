"""The closed forms, from formulas alone: counts of whole models, measured bytes of gpt3-857m, laws between cases.

The mode autotp, and Megatron's own counts and calls beside ours.

Sources: modes.md 4.3 (counts), 8.2 and section 5 (bytes that Megatron-LM was measured to send).
"""

import math
from collections import Counter

import pytest

from shardproof.parallel.data_parallel.calls import estimated_mb
from shardproof.parallel.slicing.rows import widths
from shardproof.parallel.slicing.slices import slices
from shardproof.parallel.slicing.words import Sliced
from shardproof.parallel.subject import scheme_of, subject
from shardproof.reference.case import Case
from tests.parallel.case_tables import TABLES
from tests.parallel.ranks import stated


def _counts(case: Case, phase: str) -> dict[str, int]:
    """Op -> calls in one phase over the whole run."""
    return stated(case, "op", where=lambda term: term.phase == phase)


LAYERS = 5
ONE = f"layers={LAYERS} steps=1 micro=1 tp=4 kv_heads=4"


@pytest.mark.parametrize(
    ("words", "columns"),
    [
        ("positions=learned", 2),
        ("positions=rope activation=swiglu", 3),
        ("positions=learned activation=swiglu fuse_mlp=true", 2),
        ("positions=rope fuse_qkv=false activation=swiglu", 5),
        ("positions=rope fuse_qkv=false", 4),
    ],
)
def test_counts_of_one_micro_batch(words: str, columns: int) -> None:
    text = f"{ONE} {words} recompute=full"
    tp, sp = Case.parse(f"mode=tp {text}"), Case.parse(f"mode=tp-sp {text}")
    assert _counts(tp, "forward") == {"all_reduce": 2 * LAYERS + 1}
    assert _counts(tp, "backward") == {"all_reduce": columns * LAYERS + 1}
    assert _counts(tp, "recompute") == {"all_reduce": 2 * LAYERS}
    forward = {"all_gather": columns * LAYERS + 1, "reduce_scatter": 2 * LAYERS}
    if "learned" in words:
        forward["all_reduce"] = 1
    else:
        forward["reduce_scatter"] += 1
    assert _counts(sp, "forward") == forward
    assert _counts(sp, "backward") == {"all_gather": (columns + 2) * LAYERS + 2, "reduce_scatter": columns * LAYERS + 1}
    assert _counts(sp, "recompute") == {"all_gather": columns * LAYERS, "reduce_scatter": 2 * LAYERS}
    assert _counts(tp, "loss") == _counts(sp, "loss") == {"all_reduce": 3}


MODE = scheme_of("autotp")


@pytest.mark.parametrize(("tp", "family"), [(2, "opt"), (3, "llama"), (4, "opt")])
def test_a_rank_holds_what_the_slices_say(tp: int, family: str) -> None:
    """The mode and `shardproof slice` are one rule: the same rows and columns of the same weights."""
    case = Case.parse(f"{TABLES['uneven'].sizes} tp={tp} family={family} tied=false fuse_qkv=false head=sum")
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
    """Real shapes: 12 heads as 3 3 2 2 2, and fc1's 3072 features in proportion."""
    case = Case.parse("preset=opt-125m mode=autotp tp=5 layers=1 fuse_qkv=false seq=16")
    places = MODE.placements(case)
    assert widths(places["layers.0.attention.wq.weight"].cuts[0].held) == (192, 192, 128, 128, 128)
    assert widths(places["layers.0.mlp.w1.weight"].cuts[0].held) == (768, 768, 512, 512, 512)
    assert places["embedding.tokens.weight"].shape == (50272, 768) and not places["embedding.tokens.weight"].cuts


def test_calls_are_deepspeed_s() -> None:
    """modes.md 8.2: all-reduces of each column in backward, of each row in forward; the head's logits; nothing else."""
    case = Case.parse("preset=opt-125m mode=autotp tp=4 steps=1 micro=1 dtype=bfloat16 fuse_qkv=false head=sum")
    calls = stated(case, "region", "phase", "op", where=lambda term: term.axis == "tp" and term.phase != "data")
    found = Counter[tuple[str, ...]]()
    for (region, *kind), count in calls.items():
        found[region.partition(".")[0], *kind] += count * bool(region)
    layers = {("layers", "forward", "all_reduce"): 2 * 12, ("layers", "backward", "all_reduce"): 4 * 12}
    assert +found == layers | {("head", "forward", "all_reduce"): 1, ("head", "backward", "all_reduce"): 2}


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
    assert not [*subject.beside(Case.parse("preset=tiny-internlm2 mode=isp"))], "of another system"


def test_the_calls_of_a_step_are_those_that_were_measured() -> None:
    """404 all-reduces of four micro-batches and five of the step over four ranks, two over groups of one."""
    case = Case.parse(f"{PUBLISHED} steps=1")
    ours = stated(case, "op")
    calls = [value for what, value in subject.beside(case) if what.startswith("Megatron's step")]
    alone = [value for value in calls if value.endswith("a group of one")]
    assert (ours["all_reduce"] + len(calls) - len(alone), len(alone)) == (404 + 5, 2)
    scaled = Case.parse(f"{PUBLISHED} steps=1 master=float32 scaler=dynamic")
    assert stated(scaled, "phase", "reduce_op")["grad_sync", "max"] == 1
    assert not [what for what, _ in subject.beside(scaled) if "infinite" in what]


@pytest.mark.parametrize(("words", "bytes_of_one"), [("dp=8", 18.0), ("dp=8 zero=1", 6 + 12 / 8)])
def test_a_distributed_optimizer_shares_twelve_bytes(words: str, bytes_of_one: float) -> None:
    case = Case.parse(f"{PUBLISHED} {words}")
    counted = 24 * (12 * 1024**2 + 4 * 1024) + 2 * 1024 + 50688 * 1024
    assert math.isclose(estimated_mb(case), counted / 4 * bytes_of_one / 2**20)
