"""Pipeline stages against the dense model, and their ledgers against the closed form at every stage."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from parallel.communication.layout import local_shape
from parallel.communication.mesh import coordinates
from parallel.schedules.stages import held, stages
from parallel.schemes.tp import TP
from parallel.subject import subject
from reference.case import Case
from reference.model.parameters import shapes


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
    flat = case.but(pp=1)
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
