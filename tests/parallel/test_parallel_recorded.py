"""What the recorder sees of the whole subject, phases and regions told from outside: exactly the closed form.

Also: nothing asynchronous is left unwaited, and removing a collective shows at the module and phase that lacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.differences import Difference, differences
from harness.engines.threads.inproc import InprocEngine
from harness.ledger import Event
from harness.recording.recorder import Recorder
from parallel.expectation import Term
from parallel.subject import subject
from reference.case import Case
from reference.parameters import shapes
from suites.mutants.planting import planted, replaced
from suites.strategies import cases
from tests.parallel.ranks import CPU, MEGATRON


def _recorded(case: Case, run: Callable[..., Any] = subject) -> tuple[Event, ...]:
    """Every event of every rank; asserts that every asynchronous call was waited for."""
    recorder = Recorder(str(case), case.mode, case.world_size, case.axes)

    def program(rank: int) -> None:
        with recorder.on_rank(rank):
            run(case, CPU)

    with recorder, InprocEngine() as engine:
        engine.run(program, world_size=case.world_size, observer=recorder)
        assert engine.unwaited == ()
    return tuple(recorder.events())


def _parted(case: Case, events: Iterable[Event]) -> list[Difference]:
    terms: Iterable[Term] = subject.expected(case)
    holders = [name.rpartition(".")[0] for name in shapes(case)]
    order = ["embedding", *dict.fromkeys(holder for holder in holders if not holder.startswith("embedding.")), "head"]
    return differences(events, terms, range(case.world_size), order)


@pytest.mark.parametrize("megatron", MEGATRON)
@pytest.mark.parametrize("words", ["", "positions=rope", "activation=swiglu positions=rope"])
def test_the_ledger_is_the_closed_form(megatron: str, words: str) -> None:
    case = Case.parse(f"mode={megatron} tp=4 kv_heads=4 batch=3 micro=3 steps=3 dtype=float64 {words}")
    events = _recorded(case)
    assert _parted(case, events) == []
    layers, micro = case.layers, case.steps * case.micro
    found = {(e.phase, e.op): 0 for e in events}
    for event in events:
        found[event.phase, event.op] += event.rank == 0
    columns = layers * (3 if "swiglu" in words else 2)
    if megatron == "tp":
        assert found["forward", "all_reduce"] == (2 * layers + 1) * micro
        assert found["backward", "all_reduce"] == (columns + 1) * micro
    else:
        assert found["forward", "all_gather"] == (columns + 1) * micro
        assert found["backward", "all_gather"] == (columns + 2 * layers + 2) * micro
        assert found["backward", "reduce_scatter"] == (columns + 1) * micro
    assert found["loss", "all_reduce"] == 3 * micro


@pytest.mark.parametrize("megatron", MEGATRON)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_the_ledger_of_any_drawn_case_is_its_closed_form(megatron: str, data: st.DataObject) -> None:
    case = data.draw(cases(megatron, worlds=(2, 3, 6), head=data.draw(st.sampled_from(("parallel", "gather")))))
    assert _parted(case, _recorded(case)) == []


@pytest.mark.parametrize("words", ["tp=1", "tp=1 dp=2", "tp=2 dp=3 delivery=flat qk_norm=true", "tp=2 delivery=local"])
@pytest.mark.parametrize("megatron", MEGATRON)
def test_few_ranks_and_every_delivery_have_their_closed_form(megatron: str, words: str) -> None:
    case = Case.parse(f"mode={megatron} layers=1 {words}")
    assert _parted(case, _recorded(case)) == []


SMALL = "layers=1 heads=4 kv_heads=4 hidden=16 ffn=16 seq=8 steps=1 micro=1 tp=2"
GATHER = "lambda grad: _all_gather(grad, axis, dim=dim))"
SENDS_EACH = 'arrived[key] = broadcast(tensor, mesh.axis("tp"))'
SIZES = [[2, 8, 0, 0, 0]] * 3 + [[2, 1, 8, 8, 0]] + [[2, 8, 0, 0, 0]]
"""What the broadcast of sizes says in a case of two rows of eight tokens."""
REMOVALS = {
    "embedding, summed": (
        "tp",
        "parallel.embedding",
        ("x_BSD = pairs.reduce_from(x_BSD, region.axis)", "pass"),
        ("forward", "embedding"),
    ),
    "row output, summed": (
        "tp",
        "parallel.linear",
        ("y = self.region.leave(functional.linear(x, self.weight))", "y = functional.linear(x, self.weight)"),
        ("forward", "layers.0.attention.wo"),
    ),
    "column input gradient, summed": (
        "tp",
        "parallel.linear",
        ("return start_all_reduce(grad, self.axis, overlap=overlap)", "return Pending(None, lambda: grad)"),
        ("backward", "head"),
    ),
    "column input, gathered": (
        "tp-sp",
        "parallel.linear",
        ("all_gather(x, self.axis, dim=self.sequence_dim)", "torch.cat([x, x], self.sequence_dim)"),
        ("forward", "layers.0.attention.wqkv"),
    ),
    "column input, gathered again": (
        "tp-sp",
        "parallel.linear",
        ("else region.start_gather(x)", "else Pending(None, lambda: torch.cat([x, x], region.sequence_dim))"),
        ("backward", "head"),
    ),
    "column input gradient, summed and split": (
        "tp-sp",
        "parallel.linear",
        (
            "return start_reduce_scatter(grad, self.axis, dim=self.sequence_dim, overlap=overlap)",
            "return Pending(None, lambda: grad.chunk(2, self.sequence_dim)[self.axis.rank])",
        ),
        ("backward", "head"),
    ),
    "row output, summed and split": (
        "tp-sp",
        "parallel.pairs",
        (f"lambda y: _reduce_scatter(y, axis, dim=dim), {GATHER}", f"lambda y: own_slice(y, axis, dim=dim), {GATHER}"),
        ("forward", "layers.0.attention.wo"),
    ),
    "row output gradient, gathered": (
        "tp-sp",
        "parallel.pairs",
        (
            f"lambda y: _reduce_scatter(y, axis, dim=dim), {GATHER}",
            "lambda y: _reduce_scatter(y, axis, dim=dim), lambda grad: torch.cat([grad, grad], dim))",
        ),
        ("backward", "layers.0.mlp.w2"),
    ),
    "embedding gradient, gathered": (
        "tp-sp",
        "parallel.pairs",
        (
            f"lambda y: own_slice(y, axis, dim=dim), {GATHER}",
            "lambda y: own_slice(y, axis, dim=dim), lambda grad: torch.cat([grad, grad], dim))",
        ),
        ("backward", "embedding"),
    ),
    "logits, gathered": (
        "tp head=gather",
        "parallel.embedding",
        ("logits = pairs.gather_from(logits, self.region.axis)", "logits = torch.cat([logits, logits], -1)"),
        ("forward", "head"),
    ),
    "loss, maximum": ("tp", "parallel.loss", ('all_reduce(x.amax(-1), axis, op="max")', "x.amax(-1)"), ("loss", "")),
    "loss, first sum": (
        "tp",
        "parallel.loss",
        ("[all_reduce(term, axis) for term in terms]", "[terms[0], all_reduce(terms[1], axis)]"),
        ("loss", ""),
    ),
    "loss, second sum": (
        "tp",
        "parallel.loss",
        ("[all_reduce(term, axis) for term in terms]", "[all_reduce(terms[0], axis), terms[1]]"),
        ("loss", ""),
    ),
    "loss, fused sum": (
        "tp cross_entropy=fused",
        "parallel.loss",
        ("list(all_reduce(torch.stack(terms), axis))", "terms"),
        ("loss", ""),
    ),
    **{
        f"data, {key}": (
            "tp",
            "parallel.batch",
            (SENDS_EACH, f'arrived[key] = tensor if key == "{key}" else broadcast(tensor, mesh.axis("tp"))'),
            ("data", ""),
        )
        for key in ("tokens", "labels", "loss_mask", "attention_mask", "positions")
    },
    "data, sizes": (
        "tp delivery=flat",
        "parallel.batch",
        ("_told(broadcast(sizes, axis), case)", f"_told(torch.tensor({SIZES}), case)"),
        ("data", ""),
    ),
    "data, everything": (
        "tp delivery=flat",
        "parallel.batch",
        ("parts = broadcast(flat, axis).split(lengths)", "parts = flat.split(lengths)"),
        ("data", ""),
    ),
    "gradients of other data": (
        "tp dp=3",
        "parallel.training",
        ("sync.sum_gradients(gradients.values(), mesh.axis(axis))", "pass"),
        ("grad_sync", ""),
    ),
    "partial gradients": (
        "tp-sp",
        "parallel.training",
        ("sync.sum_gradients(group, weight_axis, op=mode.partial_op)", "pass"),
        ("grad_sync", ""),
    ),
    "loss and tokens": ("tp dp=3", "parallel.gradients", ("pair = all_reduce(pair, axis)", "pass"), ("grad_sync", "")),
    "squared norm": (
        "tp",
        "parallel.gradients",
        ("all_reduce(torch.stack(squares).sum(), axis).sqrt()", "torch.stack(squares).sum().sqrt()"),
        ("grad_sync", ""),
    ),
}
"""What is removed -> (words of the case, module, (text, text without the call), (phase, region) that lacks it)."""


@pytest.mark.parametrize("name", REMOVALS)
def test_a_removed_collective_is_missing_at_its_module_and_phase(name: str) -> None:
    words, module, (old, new), (phase, region) = REMOVALS[name]
    case = Case.parse(f"mode={words} {SMALL}")
    first = _parted(case, _recorded(case, planted(replaced(module, old, new))))[0]
    assert (first.kind, first.line.phase, first.line.region) == ("missing", phase, region)
    assert first.ranks == tuple(range(case.world_size))
