"""Torch's own `fully_shard` in place of our shards of rows issues what these do: one `compare` of both runs, and the
closed form.

On a pipeline each chunk is a root of its own, and backward is set as in torch's `_PipelineStageBase`. Nothing is
resharded or reduced before the last micro-batch.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from shardproof.harness.dense_model import parse_cases
from shardproof.harness.running.request import Request
from shardproof.harness.running.run import run_request
from shardproof.harness.subject import resolve_subject
from shardproof.parallel.communication.layout import Cut
from shardproof.parallel.communication.schedules import Action
from shardproof.parallel.model.strategy import Rank, Step
from shardproof.parallel.pipeline import StageRun, as_scheduled, with_channels
from shardproof.parallel.subject import strategy_of
from shardproof.reference.case import Case
from shardproof.reports.commands.cli import main
from shardproof.suites.session.prover import Prover
from tests.deep import deep
from tests.parallel.ranks import Otherwise


def _sharded(rank: Rank) -> Rank:
    """Every chunk under `fully_shard`: experts over the ranks with copies, layers, then itself; gradients are sums, as
    ours are.
    """
    case = rank.case
    mesh = init_device_mesh("cpu", (case.pp, case.dp), mesh_dim_names=("pp", "dp"))["dp"]
    copies = DeviceMesh("cpu", case.axes["edp"], mesh_dim_names=("others", "edp"))["edp"] if case.experts else mesh
    for _, chunk in rank.chunks:
        for layer in chunk.get_submodule("layers").children():
            if case.experts:
                fully_shard(layer.get_submodule("mlp.experts"), mesh=copies, reshard_after_forward=case.zero == 3)
            fully_shard(layer, mesh=mesh, reshard_after_forward=case.zero == 3)
        fully_shard(chunk, mesh=mesh)
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    cuts = {name: Cut(axis=case.data_axis_of(name), dim=0, order="chunks") for name in rank.places}
    places = {name: replace(place, cuts=(*place.cuts, cuts[name])) for name, place in rank.places.items()}
    shards = {name: _local(weight) for name, weight in _weights(rank)}
    return replace(rank, parameters=shards, places=places, updated=shards, updated_places=places)


def _weights(rank: Rank) -> Iterator[tuple[str, Tensor]]:
    for _, chunk in rank.chunks:
        yield from chunk.named_parameters()


class _Stages(StageRun):
    """Stages of which only the last backward reshards and reduces."""

    def backward(self, action: Action) -> None:
        chunk = self.rank.chunks[action.chunk][1]
        assert isinstance(chunk, FSDPModule)
        last = action.micro == self.rank.case.micro - 1
        chunk.set_is_last_backward(last)
        chunk.set_reshard_after_backward(last)
        chunk.set_requires_gradient_sync(last)
        super().backward(action)


def _local(weight: object) -> Tensor:
    assert isinstance(weight, DTensor)
    with torch.no_grad():
        return weight.to_local()


def _handed(rank: Rank) -> None:
    """The gradients of the shards that the optimizer steps."""
    for name, weight in _weights(rank):
        assert weight.grad is not None
        rank.updated[name].grad, weight.grad = _local(weight.grad), None


def _step(case: Case, plain: Step) -> Step:
    made = strategy_of(case).step(case, plain)
    scheduled = partial(as_scheduled, by=_Stages) if case.pp > 1 else made.schedule
    return replace(
        made,
        prepare=lambda rank: _sharded(with_channels(rank) if case.pp > 1 else rank),
        schedule=scheduled,
        reductions={"data": _handed},
        afterwards=plain.afterwards,
    )


theirs = Otherwise(
    step=_step,
    takes=lambda case: case.mode == "tp" and case.tp == 1 and case.zero > 1 and not case.shard,
    legal="mode=tp tp=1 zero=2|3",
)


SIZES = "mode=tp tp=1 layers=2 heads=6 kv_heads=3 hidden=30 ffn=41 vocab=389 seq=9 batch=2 micro=3 steps=2 lr=0.1"
THEIRS = "tests.parallel.data_parallel.test_fsdp:theirs"


def test_one_compare_of_ours_and_torchs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every event alike, with its module and phase: rows that dp=4 does not divide, some ranks without any."""
    cases = parse_cases((f"{SIZES} dp=4 zero=2",))
    folders = []
    for name in ("shardproof.parallel.subject:subject", THEIRS):
        result = run_request(Request(cases=cases, subject=resolve_subject(name), out=tmp_path / name.partition(":")[0]))
        assert result.exit_status == 0
        folders.append(str(result.path))
    assert main(["compare", *folders, "--fail", "events:0"]) == 0
    assert "no limit is broken: events:0" in capsys.readouterr().out


EXPERTS = "ep=2 experts=6 expert_ffn=12 activation=relu routing=equal"  # over two ranks, in shards of two and of one
STAGES = "no_sync=true tied=false"


@pytest.mark.parametrize(
    "words",
    [
        "dp=4 zero=3 recompute=full",
        f"{STAGES} pp=2 dp=2 zero=2 layers=4 micro=4 schedule=interleaved chunks=2",
        *deep(
            "three CPU seconds each",
            "dp=3 zero=3",
            f"dp=4 zero=3 {EXPERTS}",
            f"{STAGES} pp=2 dp=3 zero=3 layers=3 first_layers=1",
        ),
    ],
)
def test_calls_and_numbers_are_torchs(prover: Prover, words: str) -> None:
    """Its next layer is prefetched for backward: as many bytes, in another module. All else of every stage agrees."""
    case = Case.parse(f"{SIZES} {words}")
    result = prover.proof(case, theirs, repeat=False)
    assert {verdict.check for verdict in result.verdicts if verdict.verdict != "pass"} <= {"ledger"}
    for place in range(case.pp):
        found = Counter(_line(event) for event in result.events if event.rank == place * case.dp)
        expected = Counter[tuple[object, ...]]()
        for term in theirs.expected(case):
            if term.at.get("pp", place) == place:
                expected[_line(term)] += term.calls
        assert found == expected


def _line(event: Any) -> tuple[object, ...]:
    """Compared fields of an event: the module of a gather of backward is none."""
    gathered_again = event.op == "all_gather" and event.phase in ("backward", "recompute")
    place = ("backward", "") if gathered_again else (event.phase, event.region)
    return (*place, event.op, event.reduce_op, event.axis, event.dtype, event.payload_bytes)
