"""Tests of pipeline. Pipeline stages beside the dense model and their closed form, and in Megatron-Core's and
torch's own schedules.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardproof.harness.verdicts.verdict import PASS
from shardproof.parallel.communication.layout import axis_rank
from shardproof.parallel.communication.schedules import stages
from shardproof.parallel.model.strategy import Rank, Scheduled, Step
from shardproof.parallel.pipeline import message_shape
from shardproof.parallel.subject import strategy_of, subject
from shardproof.parallel.training import MicroBatches
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import dtype_of, shapes
from shardproof.suites.session.prover import Prover
from tests.deep import deep
from tests.parallel.ranks import Otherwise, stated


class _Chunk(nn.Module):
    """A stage of ours as a module of theirs; `chunk` stays outside of it, so that modules keep our names."""

    def __init__(self, run: MicroBatches, number: int) -> None:
        super().__init__()
        self.run, self.number = run, number
        self.stage = run.rank.chunks[number][0].index
        self.given: Tensor | None = None

    def set_input_tensor(self, inputs: list[Tensor | None]) -> None:
        self.given = inputs[0]

    def output(self, micro: int, given: Tensor | None) -> Tensor:
        return self.run.forward(micro, self.number, given).contiguous()

    def forward(self, x: Tensor, micro: Tensor) -> Tensor:
        return self.output(int(micro), x if self.stage else None)


def _megatron(rank: Rank, step: int) -> Scheduled:
    from tests.parallel.schedules.megatron_steps import run_schedule  # noqa: PLC0415  (an extra)

    case, run = rank.case, MicroBatches(rank, step)

    def forward(batches: Any, chunk: _Chunk) -> tuple[Tensor, Callable[[Tensor], Any]]:
        return chunk.output(next(batches), chunk.given), lambda loss: (loss, torch.ones((), dtype=torch.int), {})

    run_schedule(
        forward,
        [_Chunk(run, number) for number in range(case.chunks)],
        rank.mesh.axis("pp").group,
        rank.mesh.axis("tp").group,
        group=(case.group or case.pp) if case.chunks > 1 else None,
        sizes=(case.micro, case.batch, case.seq),
        num_layers=case.layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        pipeline_dtype=dtype_of(case),
        batch_p2p_sync=False,
        calculate_per_token_loss=True,
    )
    return run.sums


def _torch(rank: Rank, step: int) -> Scheduled:
    from torch.distributed import pipelining  # noqa: PLC0415  (imports much)

    case, run, axis = rank.case, MicroBatches(rank, step), rank.mesh.axis("pp")
    shape = message_shape(case, sequence_dim=rank.strategy.sequence_dim)
    between = torch.empty(shape, dtype=dtype_of(case), requires_grad=True)
    numbers = torch.arange(case.micro)
    stages: Any = [
        pipelining.PipelineStage(
            _Chunk(run, number),
            stage.index,
            stage.count,
            rank.device,
            input_args=(numbers[:1],) if stage.first else (between,),
            output_args=(torch.zeros((), dtype=dtype_of(case), requires_grad=True),) if stage.last else (between,),
            group=axis.group,
        )
        for number, (stage, _) in enumerate(rank.chunks)
    ]
    kinds: dict[str, Any] = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
    kind = kinds.get(case.schedule, pipelining.ScheduleInterleaved1F1B)
    made = kind(stages if case.chunks > 1 else stages[0], case.micro, loss_fn=lambda x, _: x, scale_grads=False)
    first, last = stages[0].is_first, stages[-1].is_last
    words: dict[str, Any] = {"target": numbers, "losses": []} if last else {}
    made.step(*((numbers,) if first else ()), micro=numbers, return_outputs=False, **words)
    return run.sums


def _scheduled(schedule: Callable[[Rank, int], Scheduled]) -> Otherwise:
    def step(case: Case, plain: Step) -> Step:
        return replace(strategy_of(case).step(case, plain), schedule=schedule)

    return Otherwise(step=step, takes=lambda case: case.pp > 1, legal="pp=1")


by_megatron, by_torch = _scheduled(_megatron), _scheduled(_torch)


SIZES = "mode=tp tp=1 heads=6 kv_heads=3 hidden=24 ffn=42 vocab=389 seq=9 batch=2 steps=2 lr=0.1"
CASES = (
    "pp=2 layers=3 first_layers=2 micro=3",
    "pp=3 layers=6 micro=3 schedule=interleaved chunks=2",
    "pp=4 layers=5 last_layers=2 micro=6",
    "pp=2 dp=3 layers=2 micro=3",
)
COST = "some CPU seconds each"
OF_MEGATRON = ("pp=4 layers=4 micro=2 tied=false", "pp=2 dp=3 layers=2 micro=3 zero=1")
"""Fewer micro-batches than stages, which torch refuses; calls after a step, beside which torch's own would be seen."""


@pytest.mark.peers
@pytest.mark.parametrize("words", [CASES[0], *deep(COST, *CASES[1:], *OF_MEGATRON)])
def test_megatrons_schedules_pass_every_check(prover: Prover, words: str) -> None:
    """1F1B and interleaved of Megatron-Core 0.16.1: gradients, and every message of the closed form."""
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    result = prover.proof(Case.parse(f"{SIZES} {words}"), by_megatron)
    assert [verdict.message for verdict in result.verdicts if verdict.verdict != PASS] == []
    assert "ledger" in {verdict.check for verdict in result.verdicts}


@pytest.mark.parametrize("words", [CASES[1], *deep(COST, CASES[0], *CASES[2:], "pp=2 layers=2 micro=3 schedule=gpipe")])
def test_torchs_schedules_agree_on_shapes_first(prover: Prover, words: str) -> None:
    """torch.distributed.pipelining: every number, and every message of activations and gradients, is ours.

    Before its first micro-batch it has more calls, of bytes and int32: stages agree on how to learn shapes.
    """
    case = Case.parse(f"{SIZES} {words}")
    result = prover.proof(case, by_torch)
    assert [verdict.check for verdict in result.verdicts if verdict.verdict != PASS] == ["ledger"]
    found, expected = Counter[tuple[object, ...]](), Counter[tuple[object, ...]]()
    for event in result.events:
        if event.dtype == case.dtype:
            found[event.rank, event.phase, event.region, event.op, event.axis, event.payload_bytes] += 1
    for rank in range(case.world_size):
        for term in subject.expected(case):
            if term.dtype == case.dtype and all(axis_rank(case, axis, rank) == at for axis, at in term.at.items()):
                expected[rank, term.phase, term.region, term.op, term.axis, term.payload_bytes] += term.calls
    assert found == expected
    assert any(event.dtype == "int32" and event.phase == "pipeline" for event in result.events)


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
    """A step has `2 m (pp chunks - 1)` messages.

    All other terms of layers are those without stages, though not always of the same linear where weights are
    gathered.
    """
    terms = list(subject.expected(case))
    moved = stated(case, "op", where=lambda term: term.phase == "pipeline")
    assert moved == dict.fromkeys(("send", "recv"), 2 * case.steps * case.micro * (case.pp * case.chunks - 1))
    flat = case.but(pp=1)
    inside = [
        Counter((t.phase, t.region * (t.axis != "wp"), t.op, t.payload_bytes, t.calls) for t in found if t.region)
        for found in (terms, subject.expected(flat))
    ]
    assert inside[0] == inside[1]
    assert all(term.at for term in terms if term.region)
