"""Tests of schemes/isp and schemes/tensor. The modes of InternEvo: mtp, msp, fsp and isp, and their calls against
modes.md.
"""

from collections import Counter

import pytest
import torch
from torch import Tensor

from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.outcome.blocks import localize
from shardproof.harness.running.ranks.execution import execute
from shardproof.parallel.communication.batch import deliver
from shardproof.parallel.communication.layout import Mesh
from shardproof.parallel.layers.weight_parallel import WeightLinear
from shardproof.parallel.schemes.isp import ISP
from shardproof.parallel.subject import subject
from shardproof.parallel.training import set_up
from shardproof.reference.case import Case
from tests.parallel.ranks import CPU, on_ranks, outcome, stated

EVO = "family=internlm2 vocab=264"


@pytest.mark.parametrize("words", ["recompute=none", "recompute=full", "fuse_weights=true", "recompute=selective"])
def test_prefetch_changes_no_bit(words: str) -> None:
    """Overlap and fusion move calls, never numbers."""
    case = f"mode=isp {EVO} tp=2 dp=2 wp=4 steps=1 {words}"
    plain = outcome(f"{case} overlap=false fuse_weights=false")
    for name, tensor in outcome(f"{case} overlap=true").items():
        assert torch.equal(tensor, plain[name]), name


@pytest.mark.parametrize(
    "words",
    [
        "recompute=none overlap=false",
        "recompute=none overlap=true fuse_weights=true",
        "recompute=selective overlap=true",
        "recompute=full overlap=false fuse_weights=true",
        "recompute=full overlap=true",
    ],
)
def test_no_gathered_weight_outlives_its_use(words: str) -> None:
    """Autograd saves no tensor as large as a whole weight, and after a micro-batch nothing is held or under way."""
    case = Case.parse(f"mode=isp {EVO} tp=2 wp=2 layers=3 bias=true seq=4 batch=1 {words}")
    smallest = case.hidden * case.hidden

    def program(rank: int) -> tuple[int, bool]:
        state, saved = set_up(case, ISP, Mesh.of(case), CPU), [0]

        def pack(x: Tensor) -> Tensor:
            own = any(
                x.untyped_storage().data_ptr() == p.untyped_storage().data_ptr() for p in state.model.parameters()
            )
            saved[0] = max(saved[0], 0 if own else x.untyped_storage().nbytes() // x.element_size())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            batch = state.parts.local(deliver(case, state.mesh, 0, 0, CPU))
            state.parts.loss(state.model(batch), batch.labels).sum().backward()
        linears = [module for module in state.model.modules() if isinstance(module, WeightLinear)]
        return saved[0], all(linear.seat.gathers.idle for linear in linears)

    for largest, idle in on_ranks(2, program):
        assert 0 < largest < smallest
        assert idle


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_prefetched_is_asynchronous(overlap: bool) -> None:
    """Gathers of blocks travel ahead under overlap only; gradients always travel during the next product."""
    case = Case.parse(f"mode=isp {EVO} steps=1 micro=1 tp=2 layers=2").but(overlap=overlap)
    with InprocEngine() as engine:
        events = execute(case, subject, engine, text="").events
    kinds = Counter((e.op, e.is_async) for e in events if e.axis == "wp" and e.region.startswith("layers."))
    assert kinds == {("all_gather", overlap): 2 * 2 * 2 * 5, ("reduce_scatter", True): 2 * 2 * 5}


LINEARS = {2: "fuse_mlp=true", 3: "", 4: "fuse_qkv=false fuse_mlp=true", 5: "fuse_qkv=false"}
"""Column linears a layer -> the words that give them."""


def _per_layer(case: Case) -> dict[tuple[str, str], tuple[int, int]]:
    """(phase, op) -> (calls, bytes) of one layer and micro-batch, the rest of the model left out."""
    calls, sizes = (
        stated(case, "phase", "op", where=lambda term: term.region.startswith("layers."), each=each)
        for each in ("calls", "bytes")
    )
    runs = case.layers * case.micro * case.steps
    assert not any(count % runs for count in (*calls.values(), *sizes.values()))
    return {key: (calls[key] // runs, sizes[key] // runs) for key in calls}


@pytest.mark.parametrize(
    ("columns", "overlap", "recompute"),
    [(2, True, "none"), (3, False, "full"), (4, True, "full"), (5, False, "selective")],
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


@pytest.mark.parametrize(
    ("columns", "recompute", "rows"),
    [
        (2, "none", "packed=true"),
        (3, "full", "packed=false"),
        (4, "selective", "packed=false"),
        (5, "full", "packed=true"),
    ],
)
def test_counts_of_a_layer_in_other_modes_are_the_literature_s(columns: int, recompute: str, rows: str) -> None:
    """modes.md section 2, every payload A; overlap moves calls and changes none."""
    for mode in ("mtp", "msp", "fsp"):
        words = f"preset=internlm2-7b mode={mode} tp=8 dp=4 layers=3 dtype=bfloat16 micro=3 batch=2 {rows}"
        case = Case.parse(f"{words} recompute={recompute} {LINEARS[columns]}")
        gathers = {"mtp": 0, "msp": 2, "fsp": 2 + columns}[mode]
        forward = {"all_reduce": 2} if mode == "mtp" else {"all_gather": columns, "reduce_scatter": 2}
        backward = {"all_reduce": columns} if mode == "mtp" else {"all_gather": gathers, "reduce_scatter": columns}
        phases = {"forward": forward, "backward": backward, **({"recompute": forward} if recompute == "full" else {})}
        calls = {(phase, op): count for phase, ops in phases.items() for op, count in ops.items()}
        activation = case.tokens * case.hidden * 2
        assert _per_layer(case) == {key: (count, count * activation) for key, count in calls.items()}
        fields = ("phase", "region", "op", "axis", "payload_bytes")
        assert stated(case.but(overlap=False), *fields) == stated(case, *fields)


def test_msp_and_fsp_give_the_same_bits() -> None:
    case = Case.parse(
        f"mode=msp {EVO} tp=2 heads=4 kv_heads=2 hidden=16 ffn=32 seq=8 recompute=full packed=true batch=3"
    )
    msp, fsp = (on_ranks(2, lambda _, c=c: localize(subject(c, CPU))) for c in (case, case.but(mode="fsp")))
    for kept, gathered in zip(msp, fsp, strict=True):
        assert set(kept) == set(gathered) and {"loss/0", "logits/0"} <= set(kept)
        for name, blocks in kept.items():
            assert all(torch.equal(a.local, b.local) for a, b in zip(blocks, gathered[name], strict=True)), name
