"""Our training with torch's own `fully_shard` in place of our shards of rows; all else is ours, the closed form too.

On a pipeline each chunk is a root of its own, and backward is set as torch's `_PipelineStageBase` sets it: nothing is
resharded or reduced before the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from parallel.communication.expectation import CompleteTerm
from parallel.communication.layout import Cut
from parallel.communication.mesh import Mesh
from parallel.data_parallel.scheme import applied
from parallel.model.strategy import Rank, Step, Value
from parallel.pipeline.scheme import StageRun, as_scheduled, with_channels
from parallel.registry import MODES, strategy_of
from parallel.schedules.pipeline import Action
from parallel.subject import subject as ours
from parallel.training.loop import train
from reference.case import Case


def _sharded(rank: Rank) -> Rank:
    """Every chunk under `fully_shard`: its layers, then itself; gradients are sums, as ours are."""
    case = rank.case
    mesh = init_device_mesh("cpu", (case.pp, case.dp), mesh_dim_names=("pp", "dp"))["dp"]
    for _, chunk in rank.chunks:
        for layer in chunk.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh, reshard_after_forward=case.zero == 3)
        fully_shard(chunk, mesh=mesh)
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    cut = Cut(axis="dp", dim=0, order="chunks")
    places = {name: replace(place, cuts=(*place.cuts, cut)) for name, place in rank.places.items()}
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
    made = applied(MODES[case.mode], case).step(case, plain)
    scheduled = partial(as_scheduled, by=_Stages) if case.pp > 1 else made.schedule
    return replace(
        made,
        prepare=lambda rank: _sharded(with_channels(rank) if case.pp > 1 else rank),
        schedule=scheduled,
        reductions={"data": _handed},
        afterwards=plain.afterwards,
    )


@dataclass(frozen=True)
class _Subject:
    def __call__(self, case: Case, device: torch.device) -> dict[str, Value]:
        return train(case, replace(strategy_of(case), step=_step), Mesh.of(case), device)

    def refuses(self, case: Case) -> str:
        return (
            "" if case.mode == "tp" and case.tp == 1 and case.zero > 1 and not case.shard else "mode=tp tp=1 zero=2|3"
        )

    def expected(self, case: Case) -> Iterable[CompleteTerm]:
        return ours.expected(case)


subject = _Subject()
