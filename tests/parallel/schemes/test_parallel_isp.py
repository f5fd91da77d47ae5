"""The modes of InternEvo: mtp, msp, fsp and isp, and their calls against modes.md."""

import math
from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.engines.threads.inproc import InprocEngine
from harness.outcome.blocks import localize
from harness.outcome.merging import Merged, merge
from harness.running.ranks.execution import execute
from parallel.communication.batch import deliver
from parallel.communication.mesh import Mesh
from parallel.model.strategy import Rank
from parallel.schemes.isp import ISP
from parallel.subject import subject
from parallel.training.loop import set_up
from parallel.weights.linear import WeightLinear
from reference.case import Case
from tests.parallel.ranks import CPU, on_ranks

EVO = "family=internlm2 vocab=264"


def _merged(case: Case) -> Merged:
    return merge(on_ranks(case.world_size, lambda rank: localize(subject(case, CPU))))


@pytest.mark.parametrize("words", ["recompute=none", "recompute=full", "fuse_weights=true", "recompute=selective"])
def test_prefetch_changes_no_bit(words: str) -> None:
    """Overlap and fusion move calls, never numbers."""
    case = Case.parse(f"mode=isp {EVO} tp=2 dp=2 wp=4 {words}")
    plain = _merged(case.but(overlap=False, fuse_weights=False)).tensors
    for name, tensor in _merged(case.but(overlap=True)).tensors.items():
        assert torch.equal(tensor, plain[name]), name


def _state(case: Case) -> Rank:
    return set_up(case, ISP, Mesh.of(case), CPU)


def _step(state: Rank) -> None:
    batch = state.parts.local(deliver(state.case, state.mesh, 0, 0, CPU))
    state.parts.loss(state.model(batch), batch.labels).sum().backward()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_no_gathered_weight_outlives_its_use(recompute: str, overlap: bool, fused: bool) -> None:
    """Autograd saves no tensor as large as a whole weight, and after a micro-batch nothing is held or under way."""
    case = Case.parse(
        f"mode=isp {EVO} tp=2 wp=2 layers=3 bias=true seq=4 batch=1 recompute={recompute} "
        f"overlap={str(overlap).lower()} fuse_weights={str(fused).lower()}"
    )
    smallest = case.hidden * case.hidden

    def program(rank: int) -> tuple[int, bool]:
        state, saved = _state(case), [0]

        def pack(x: Tensor) -> Tensor:
            own = any(
                x.untyped_storage().data_ptr() == p.untyped_storage().data_ptr() for p in state.model.parameters()
            )
            saved[0] = max(saved[0], 0 if own else x.untyped_storage().nbytes() // x.element_size())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            _step(state)
        linears = [module for module in state.model.modules() if isinstance(module, WeightLinear)]
        return saved[0], all(linear.seat.gathers.idle for linear in linears)

    for largest, idle in on_ranks(2, program):
        assert 0 < largest < smallest
        assert idle


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_wp_must_cut_keys_and_values_evenly(data: st.DataObject) -> None:
    """The rows of wqkv (or of wk and wv) split over wp, or the case says so."""
    wp = data.draw(st.sampled_from((2, 3, 4, 6)))
    kv_heads, dim, fuse = data.draw(st.integers(1, 3)), data.draw(st.sampled_from((1, 2, 4))), data.draw(st.booleans())
    words = f"mode=isp tp=1 dp={wp} wp={wp} positions=learned heads={12 * kv_heads} kv_heads={kv_heads} ffn=24"
    words += f" hidden={12 * kv_heads * dim} fuse_qkv={str(fuse).lower()}"
    rows = kv_heads * dim * (2 if fuse else 1)
    if rows % wp:
        with pytest.raises(ValueError, match=f"wp={wp}: must divide the {rows} rows"):
            Case.parse(words)
    else:
        assert Case.parse(words).wp == wp


EVO_ONCE = "mode=isp family=internlm2 vocab=264 steps=1 micro=1"


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_prefetched_is_asynchronous(overlap: bool) -> None:
    """Gathers of blocks travel ahead under overlap only; gradients always travel during the next product."""
    case = Case.parse(f"{EVO_ONCE} tp=2 layers=2").but(overlap=overlap)
    with InprocEngine() as engine:
        events = execute(case, subject, engine, text="").events
    kinds = Counter((e.op, e.is_async) for e in events if e.axis == "wp" and e.region.startswith("layers."))
    assert kinds == {("all_gather", overlap): 2 * 2 * 2 * 5, ("reduce_scatter", True): 2 * 2 * 5}


SMALL_EVO = "mode=isp family=internlm2 vocab=264 heads=4 kv_heads=2 hidden=16 ffn=24 seq=4 steps=1 batch=1"
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
    case = Case.parse(f"{SMALL_EVO} tp=2 layers=1 micro=1 overlap=false")
    plain, biased = _per_layer(case), _per_layer(case.but(bias=True))
    outputs = 16 + 2 * 2 * 4 + 16 + 24 + 24 + 16
    for key in (("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")):
        assert biased[key] == (plain[key][0] + 5, plain[key][1] + 8 * outputs)


def test_whole_parameters_are_summed_one_by_one_and_shards_once() -> None:
    """modes.md 3.7: 2L+1 norm gradients over wp, uncoalesced; everything in one buffer over wdp."""
    case = Case.parse(f"{SMALL_EVO} tp=2 dp=2 wp=2 layers=3 qk_norm=true")
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
    case = Case.parse(f"{SMALL_EVO} tp=2 layers=1 micro=1")
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


INTERNEVO = ("mtp", "msp", "fsp")


def _expected(case: Case) -> Counter[tuple[str, str, str, str, int]]:
    """(phase, region, op, axis, payload bytes) -> calls."""
    return Counter(
        (t.phase, t.region, t.op, t.axis, t.payload_bytes) for t in subject.expected(case) for _ in range(t.calls)
    )


@pytest.mark.parametrize(("columns", "recompute"), list(product(LINEARS, ("none", "selective", "full"))))
def test_counts_of_a_layer_are_the_literature_s(columns: int, recompute: str) -> None:
    """modes.md section 2, every payload A; overlap moves calls and changes none."""
    for mode, packed in product(INTERNEVO, ("true", "false")):
        words = f"preset=internlm2-7b mode={mode} tp=8 dp=4 layers=3 dtype=bfloat16 micro=3 batch=2 packed={packed}"
        case = Case.parse(f"{words} recompute={recompute} {LINEARS[columns]}")
        gathers = {"mtp": 0, "msp": 2, "fsp": 2 + columns}[mode]
        forward = {"all_reduce": 2} if mode == "mtp" else {"all_gather": columns, "reduce_scatter": 2}
        backward = {"all_reduce": columns} if mode == "mtp" else {"all_gather": gathers, "reduce_scatter": columns}
        phases = {"forward": forward, "backward": backward, **({"recompute": forward} if recompute == "full" else {})}
        calls = {(phase, op): count for phase, ops in phases.items() for op, count in ops.items()}
        activation = case.tokens * case.hidden * 2
        assert _per_layer(case) == {key: (count, count * activation) for key, count in calls.items()}
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
