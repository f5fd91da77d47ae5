"""The modes mtp, msp and fsp: proved against the dense model, and their calls against modes.md, table and recorder."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch

from harness.outcome.blocks import localize
from parallel.subject import subject
from reference.case import Case
from tests.parallel.ranks import CPU, on_ranks

Line = tuple[str, str, str, str, int]
"""(phase, region, op, axis, payload bytes)."""
INTERNEVO = ("mtp", "msp", "fsp")
EVO = "family=internlm2 vocab=264"
COLUMNS = {2: "fuse_mlp=true", 3: "", 4: "fuse_qkv=false fuse_mlp=true", 5: "fuse_qkv=false"}
"""Column linears a layer -> the words that give them."""


def _expected(case: Case) -> Counter[Line]:
    found: Counter[Line] = Counter()
    for term in subject.expected(case):
        found[(term.phase, term.region, term.op, term.axis, term.payload_bytes)] += term.calls
    return found


def _per_layer(case: Case) -> dict[str, dict[str, int]]:
    """Phase -> op -> calls of one layer and micro-batch; asserts that each carries one whole activation."""
    found: dict[str, dict[str, int]] = {}
    for term in subject.expected(case):
        if term.region.startswith("layers."):
            assert term.payload_bytes == case.tokens * case.hidden * 2
            ops = found.setdefault(term.phase, {})
            ops[term.op] = ops.get(term.op, 0) + term.calls
    runs = case.layers * case.micro * case.steps
    assert all(calls % runs == 0 for ops in found.values() for calls in ops.values())
    return {phase: {op: calls // runs for op, calls in ops.items()} for phase, ops in found.items()}


@pytest.mark.parametrize(("columns", "recompute"), list(product(COLUMNS, ("none", "selective", "full"))))
def test_counts_of_a_layer_are_the_literature_s(columns: int, recompute: str) -> None:
    """modes.md section 2, every payload A; overlap moves calls and changes none."""
    for mode, packed in product(INTERNEVO, ("true", "false")):
        words = f"preset=internlm2-7b mode={mode} tp=8 dp=4 layers=3 dtype=bfloat16 micro=3 batch=2 packed={packed}"
        case = Case.parse(f"{words} recompute={recompute} {COLUMNS[columns]}")
        gathers = {"mtp": 0, "msp": 2, "fsp": 2 + columns}[mode]
        forward = {"all_reduce": 2} if mode == "mtp" else {"all_gather": columns, "reduce_scatter": 2}
        backward = {"all_reduce": columns} if mode == "mtp" else {"all_gather": gathers, "reduce_scatter": columns}
        expected = {"forward": forward, "backward": backward}
        assert _per_layer(case) == (expected | {"recompute": forward} if recompute == "full" else expected)
        assert _expected(case.but(overlap=False)) == _expected(case)


@pytest.mark.parametrize("name", INTERNEVO)
def test_outside_the_layers_calls_are_the_literature_s(name: str) -> None:
    """modes.md 3.3, 3.4, 3.7: embedding, head, loss, and 2L+1 norm gradients of [h], uncoalesced, summed."""
    case = Case.parse(f"preset=internlm2-7b mode={name} tp=8 layers=3 steps=1 micro=1 dtype=bfloat16")
    whole, one, width = case.tokens * 4096 * 2, case.tokens * 4, 4096 * 2
    outside: Counter[tuple[str, str, str, str, int]] = Counter()
    for t in subject.expected(case):
        if not t.region.startswith("layers."):
            outside[(t.phase, t.region, t.op, t.reduce_op, t.payload_bytes)] += t.calls
    expected = {
        ("forward", "embedding", "all_gather", "", whole): 1,
        ("loss", "", "all_reduce", "max", one): 1,
        ("loss", "", "all_reduce", "sum", one): 2,
        ("grad_sync", "", "all_reduce", "sum", 4): 1,
    }
    if name == "mtp":
        expected |= {("backward", "head", "all_reduce", "sum", whole): 1}
    else:
        expected |= {
            ("backward", "embedding", "all_gather", "", whole): 1,
            ("forward", "head", "all_gather", "", whole): 1,
            ("backward", "head", "reduce_scatter", "sum", whole): 1,
            ("grad_sync", "", "all_reduce", "sum", width): 2 * 3 + 1,
        }
    if name == "fsp":
        expected |= {("backward", "head", "all_gather", "", whole): 1}
    assert outside == expected


@pytest.mark.parametrize("name", ["msp", "fsp"])
def test_biases_of_norms_and_rows_are_summed_one_by_one_too(name: str) -> None:
    case = Case.parse(f"mode={name} tp=2 layers=3 steps=1 tied=false qk_norm=true")
    summed = Counter(t.payload_bytes for t in subject.expected(case) for _ in range(t.calls) if t.phase == "grad_sync")
    norms, rows_ = 2 * (2 * case.layers + 1), 2 * case.layers
    assert summed == {case.hidden * 8: norms + rows_, case.head_dim * 8: 4 * case.layers, 8: 1}


@pytest.mark.parametrize("words", ["packed=true batch=3", "recompute=full batch=2 qk_norm=true"])
def test_msp_and_fsp_give_the_same_bits(words: str) -> None:
    case = Case.parse(f"mode=msp {EVO} tp=2 heads=4 kv_heads=2 hidden=16 ffn=32 seq=8 {words}")
    msp, fsp = (on_ranks(2, lambda _, c=c: localize(subject(c, CPU))) for c in (case, case.but(mode="fsp")))
    for kept, gathered in zip(msp, fsp, strict=True):
        assert set(kept) == set(gathered) and {"loss/0", "logits/0"} <= set(kept)
        for name, blocks in kept.items():
            assert all(torch.equal(a.local, b.local) for a, b in zip(blocks, gathered[name], strict=True)), name
