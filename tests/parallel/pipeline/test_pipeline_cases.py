"""Pipeline stages against the dense model, and their ledgers against the closed form at every stage."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checking.evidence import PASS
from harness.engines.shapes.dry import DryEngine
from harness.running.proof import CaseResult, prove
from parallel.communication.layout import local_shape
from parallel.communication.mesh import coordinates
from parallel.schedules.stages import held, stages
from parallel.schemes.tp import TP
from parallel.subject import subject
from reference.case import Case, CaseError
from reference.case.pipeline import WORDS
from reference.model.parameters import shapes
from suites.session.prover import Prover

SIZES = "heads=6 kv_heads=3 hidden=24 ffn=42 vocab=389 seq=9 batch=2 steps=3"
CHUNKS = "schedule=interleaved chunks=2"
HALF = "dtype=float16 master=float32 lr=0.01"
SGD, ADAMW = "lr=0.1", "optimizer=adamw lr=0.01 clip=0.05"
CASES = (
    f"mode=tp tp=1 pp=4 layers=5 first_layers=2 micro=3 {SGD}",
    f"mode=tp tp=1 pp=4 layers=4 micro=5 schedule=gpipe tied=false {ADAMW}",
    f"mode=tp-sp tp=3 pp=2 layers=3 last_layers=2 micro=3 {ADAMW}",
    f"mode=tp tp=3 pp=2 layers=3 last_layers=1 micro=1 schedule=gpipe qk_norm=true positions=rope {ADAMW}",
    f"mode=tp tp=1 pp=2 dp=2 order=pp-dp layers=3 first_layers=1 micro=5 {ADAMW}",
    f"mode=tp-sp tp=3 pp=2 layers=2 micro=3 delivery=flat head=gather recompute=selective tied=false {SGD}",
    f"mode=tp tp=1 pp=2 dp=3 layers=3 first_layers=1 micro=3 zero=1 bucket=900 {ADAMW}",
    f"mode=tp tp=1 pp=2 dp=3 layers=3 first_layers=1 micro=3 zero=3 no_sync=true prefetch=true parity=2 {ADAMW}",
    f"mode=tp tp=1 pp=2 dp=3 layers=2 micro=2 {HALF} zero=1 grad_dtype=float32 scaler=static loss_scale=8",
    f"mode=tp tp=1 pp=3 layers=6 micro=3 {CHUNKS} metric=true {SGD}",
    f"mode=tp tp=1 pp=2 layers=6 first_layers=4 micro=5 {CHUNKS} group=3 {ADAMW}",
    f"mode=fsp tp=1 pp=3 dp=2 layers=4 last_layers=2 micro=2 packed=true family=internlm2 zero=1 {ADAMW}",
    f"mode=isp tp=1 dp=2 wp=2 pp=2 layers=3 first_layers=2 micro=3 recompute=full recompute_method=block {ADAMW}",
)
DEEP = (
    f"mode=isp tp=1 dp=2 wp=2 pp=2 layers=8 micro=4 {CHUNKS} tied=true embedding=vocab metric=true {ADAMW}",
    f"mode=isp tp=3 wp=3 pp=2 dp=2 layers=6 first_layers=4 micro=5 {CHUNKS} group=3 recompute=full bias=true {SGD}",
    f"mode=isp tp=1 dp=2 wp=2 pp=4 layers=5 first_layers=2 micro=6 overlap=false recompute=full {SGD}",
    f"mode=isp tp=1 dp=3 wp=3 pp=4 layers=6 last_layers=3 micro=2 schedule=gpipe fuse_weights=true head=local {ADAMW}",
    f"mode=isp tp=2 dp=2 wp=4 pp=2 heads=4 kv_heads=2 vocab=392 ffn=44 seq=8 layers=4 micro=3 packed=true"
    f" family=internlm2 recompute=selective {SGD}",
    f"mode=isp tp=1 wp=2 dp=2 cp=2 pp=2 seq=8 layers=4 micro=3 recompute=full recompute_method=block dropout=0.2"
    f" attention_dropout=0.1 random=stateful init=shard tied=false delivery=flat head=gather {SGD}",
    f"mode=mtp tp=3 pp=2 dp=2 vocab=390 layers=4 micro=4 {CHUNKS} zero=1 embedding=hidden tied=false metric=true"
    f" {ADAMW}",
    f"mode=msp tp=3 pp=2 dp=2 vocab=390 layers=3 last_layers=2 micro=3 zero=1 bucket=900 tied=true {ADAMW}",
    f"mode=fsp tp=3 pp=3 vocab=390 layers=4 last_layers=2 micro=5 schedule=gpipe head=gather metric=true {SGD}",
    f"mode=tp tp=2 pp=2 dp=2 heads=4 kv_heads=2 layers=3 first_layers=2 micro=4 {SGD}",
    f"mode=tp-sp tp=2 pp=2 cp=2 heads=4 kv_heads=2 seq=16 layers=2 micro=4 zero=1 {ADAMW}",
    f"mode=tp tp=3 pp=2 dp=2 layers=3 last_layers=2 micro=3 zero=1 parity=1 {SGD}",
    f"mode=tp tp=1 pp=3 dp=2 layers=4 first_layers=1 last_layers=2 micro=4 zero=2 no_sync=true prefetch=true parity=1"
    f" {SGD}",
    f"mode=tp-sp tp=3 pp=2 dp=2 layers=4 micro=3 zero=3 no_sync=true prefetch=true recompute=full recompute_layers=2"
    f" {SGD}",
    f"mode=tp tp=1 pp=2 dp=4 shard=2 layers=8 micro=4 {CHUNKS} zero=3 no_sync=true prefetch=true recompute=full"
    f" recompute_method=block {ADAMW}",
    f"mode=tp tp=1 pp=2 dp=3 layers=2 micro=2 schedule=gpipe {HALF} zero=2 no_sync=true grad_dtype=float32",
    f"mode=tp-sp tp=1 pp=2 dp=3 layers=2 micro=3 packed=true delivery=local positions=rope recompute=full {SGD}",
    f"mode=tp-sp tp=1 pp=2 dp=3 layers=2 micro=3 packed=true delivery=local positions=rope zero=1 {ADAMW}",
    f"mode=tp-sp tp=3 pp=3 layers=4 first_layers=1 last_layers=1 micro=2 fuse_qkv=false activation=swiglu {ADAMW}",
    f"mode=tp tp=1 pp=5 layers=6 last_layers=2 micro=7 attention_mask=false zero=1 {SGD}",
    f"mode=tp tp=1 pp=3 dp=2 layers=7 first_layers=2 last_layers=1 micro=5 zero=1 {ADAMW}",
    f"mode=tp tp=1 pp=4 layers=8 micro=5 {CHUNKS} group=5 {ADAMW}",
    f"mode=tp tp=1 pp=4 cp=2 seq=12 layers=4 micro=2 {SGD}",
    f"mode=tp tp=1 pp=2 cp=3 seq=12 layers=2 micro=1 zero=1 {SGD}",
    f"mode=tp-sp tp=3 pp=2 cp=2 seq=12 layers=2 micro=4 zero=1 {ADAMW}",
    f"mode=tp-sp tp=3 pp=2 cp=2 seq=12 layers=4 micro=2 {CHUNKS} recompute=full {SGD}",
    f"mode=tp tp=3 pp=2 dp=2 layers=8 last_layers=2 micro=6 {CHUNKS} group=3 bucket=500 tied=false {SGD}",
    f"mode=tp-sp tp=3 pp=2 dp=2 layers=4 micro=4 {CHUNKS} zero=1 bucket=900 {ADAMW}",
    f"mode=tp-sp tp=3 pp=3 dp=2 layers=6 micro=4 {CHUNKS} group=4 delivery=flat head=gather overlap=false bucket=700"
    f" recompute=selective tied=false {ADAMW}",
    f"mode=tp-sp tp=3 pp=2 dp=2 layers=2 micro=3 {HALF} scaler=static loss_scale=8",
    f"mode=tp-sp tp=3 pp=2 dp=2 layers=2 micro=3 {HALF} zero=1 grad_dtype=float32 scaler=dynamic optimizer=adamw",
)


def proved(prover: Prover, words: str) -> CaseResult:
    result = prover.proof(Case.parse(f"{SIZES} {words}"), subject)
    wrong = [verdict.message for verdict in result.verdicts if verdict.verdict != PASS]
    assert not wrong
    return result


@pytest.mark.parametrize("words", CASES)
def test_training_is_the_dense_models_and_every_byte_is_stated(prover: Prover, words: str) -> None:
    result = proved(prover, words)
    checks = {verdict.check for verdict in result.verdicts}
    assert {"ledger", "groups", "forward", "parameter_gradients", "gradient_norm", "update", "replicas"} <= checks
    assert Counter(event.phase for event in result.events)["pipeline"] > 0


@pytest.mark.parametrize("words", DEEP)
def test_in_more_forms(prover: Prover, request: pytest.FixtureRequest, words: str) -> None:
    if request.config.getoption("hypothesis_profile", None) != "deep":
        pytest.skip("two CPU minutes in all: --hypothesis-profile deep")
    proved(prover, words)


def test_on_shapes_alone() -> None:
    """Every kind of stage by itself: the first, one in the middle, the last."""
    case = Case.parse(f"{SIZES} mode=tp-sp tp=1 pp=3 layers=4 first_layers=1 last_layers=1 micro=2")
    with DryEngine() as engine:
        result = prove(case, subject, engine)
    assert [v.verdict for v in result.verdicts if v.check == "ledger"] == [PASS]


@st.composite
def shared_layers(draw: st.DrawFn) -> Case:
    """A case whose stages may hold unequal numbers of layers, in one chunk a rank or more."""
    pp, chunks = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    first, last, each = (draw(st.integers(1, most)) * chunks for most in (3, 3, 2))
    layers = first + last + each * (pp - 2)
    mode, tied = draw(st.sampled_from(("tp", "tp-sp", "isp wp=2"))), draw(st.booleans())
    zero = draw(st.integers(0, 1)) if mode[:2] == "tp" else 0
    micro = draw(st.integers(1, 5)) if chunks == 1 else pp * draw(st.integers(1, 2))
    words = f"mode={mode} tp=2 dp=3 pp={pp} layers={layers} micro={micro} tied={str(tied).lower()} zero={zero}"
    words += f" schedule=interleaved chunks={chunks}" if chunks > 1 else ""
    return Case.parse(f"{words} first_layers={first} last_layers={last}")


@given(shared_layers())
def test_stages_hold_every_parameter_once_and_a_tied_table_twice(case: Case) -> None:
    held = Counter(name for stage in stages(case) for name in shapes(case) if stage.holds(name))
    twice = {"embedding.tokens.weight"} if case.tied else set()
    assert held == {name: 1 + (name in twice) for name in shapes(case)}
    layers = [layer for stage in stages(case) for layer in stage.layers]
    assert layers == list(range(case.layers))


@given(shared_layers())
def test_what_is_sent_is_received_and_no_layer_talks_twice(case: Case) -> None:
    """2 m (pp chunks - 1) messages a step; all other terms of layers are those without stages, where weights are
    gathered not always of the same linear.
    """
    terms = list(subject.expected(case))
    moved = Counter[str]()
    for term in terms:
        if term.phase == "pipeline":
            moved[term.op] += term.calls
    assert moved == dict.fromkeys(("send", "recv"), 2 * case.steps * case.micro * (case.pp * case.chunks - 1))
    flat = case.but(pp=1, **WORDS)
    inside = [
        Counter((t.phase, t.region * (t.axis != "wp"), t.op, t.payload_bytes, t.calls) for t in found if t.region)
        for found in (terms, subject.expected(flat))
    ]
    assert inside[0] == inside[1]
    assert all(term.at for term in terms if term.region)


@given(shared_layers())
def test_a_stage_gathers_what_it_holds_and_waits_for_its_first_linear(case: Case) -> None:
    """Forward, of the linears of a stage all but the first are gathered behind a product of the same stage."""
    if case.mode != "isp":
        case = case.but(mode="isp", zero=0, wp=2)
    for stage in stages(case):
        gathers = [
            (t.region, t.hidden, t.payload_bytes)
            for t in subject.expected(case)
            if t.axis == "wp" and t.op == "all_gather" and t.phase == "forward" and stage.holds(t.region)
            if t.region.startswith("layers.")
        ]
        weights = [8 * math.prod(shape) for name, shape in shapes(case).items() if stage.holds(name)]
        linear = f"layers.{stage.layers[0]}.attention.wqkv"
        assert [region for region, hidden, _ in gathers if not hidden] == [linear] * (1 + case.bias)
        assert len(gathers) == len(stage.layers) * 4 * (1 + case.bias)
        assert {size for *_, size in gathers} <= set(weights)


@given(shared_layers())
def test_every_chunk_shares_its_own_gradients(case: Case) -> None:
    """zero=1: one bucket a chunk and one for a tied table; what it holds, and what aligning its parameters adds."""
    local = {name: math.prod(local_shape(p, coordinates(case, 0))) for name, p in TP.placements(case).items()}
    calls: Counter[tuple[int, str]] = Counter()
    sent: Counter[tuple[int, str]] = Counter()
    for term in subject.expected(case):
        if term.axis == "dp" and term.payload_bytes > 16 and case.zero:
            calls[term.at["pp"], term.op] += term.calls // case.steps
            sent[term.at["pp"], term.op] += term.payload_bytes // 8
    for rank in range(case.pp if case.zero else 0):
        own = held(case, rank)
        buckets = len(own) + sum(stage.shares_table for stage in own)
        names = [name for stage in own for name in local if stage.holds(name)]
        for op in ("reduce_scatter", "all_gather"):
            assert calls[rank, op] == buckets
            padding = sent[rank, op] - sum(local[name] for name in names)
            assert 0 <= padding < 64 * len(names) + 3 * 128 * buckets
            assert sent[rank, op] % (3 * 128) == 0


@pytest.mark.parametrize(
    ("words", "legal"),
    [
        ("pp=3 layers=4", "layers=3"),
        ("pp=2 zero=3", "no_sync=true"),
        ("pp=2 micro=3 schedule=interleaved chunks=2", "micro=2"),
    ],
)
def test_what_has_no_form_names_a_legal_value(words: str, legal: str) -> None:
    with pytest.raises(CaseError, match=f"legal: {legal}"):
        Case.parse(words)
