"""The mode autotp: proved with uneven shares, its calls compared with closed form and recorder."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from parallel.communication.layout import gather, meshgrid, shard
from parallel.registry import MODES
from parallel.slicing.held import widths
from parallel.slicing.slices import slices
from parallel.slicing.words import Sliced
from parallel.subject import subject
from reference.case import Case
from reference.model.parameters import full, shapes
from tests.parallel.case_tables import UNEVEN

MODE = MODES["autotp"]


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
