"""Our training with torch's own `fully_shard` in place of our shards of rows; all else is ours, the closed form too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from parallel.data_parallel.scheme import with_data_parallelism
from parallel.expectation import Term
from parallel.layout import Cut
from parallel.mesh import Mesh
from parallel.registry import MODES, strategy_of
from parallel.strategy import Rank, Step, Value
from parallel.subject import subject as ours
from parallel.training import train
from reference.case import Case

__all__ = ["subject"]


def _sharded(rank: Rank) -> Rank:
    """The model under `fully_shard`: its layers, then itself; gradients are sums, as ours are."""
    case, model = rank.case, rank.model
    mesh = init_device_mesh("cpu", (case.dp,), mesh_dim_names=("dp",))
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh, reshard_after_forward=case.zero == 3)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    cut = Cut(axis="dp", dim=0, order="chunks")
    places = {name: replace(place, cuts=(*place.cuts, cut)) for name, place in rank.places.items()}
    shards = {name: _local(weight) for name, weight in model.named_parameters()}
    return replace(rank, parameters=shards, places=places, updated=shards, updated_places=places)


def _local(weight: object) -> Tensor:
    assert isinstance(weight, DTensor)
    with torch.no_grad():
        return weight.to_local()


def _handed(rank: Rank) -> None:
    """The gradients of the shards that the optimizer steps."""
    for name, weight in rank.model.named_parameters():
        assert weight.grad is not None
        rank.updated[name].grad, weight.grad = _local(weight.grad), None


def _step(case: Case, plain: Step) -> Step:
    made = with_data_parallelism(MODES[case.mode], case).step(case, plain)
    return replace(made, prepare=_sharded, reductions={"data": _handed}, afterwards=plain.afterwards)


@dataclass(frozen=True)
class _Subject:
    def __call__(self, case: Case, device: torch.device) -> dict[str, Value]:
        return train(case, replace(strategy_of(case), step=_step), Mesh.of(case), device)

    def refuses(self, case: Case) -> str:
        return (
            "" if case.mode == "tp" and case.tp == 1 and case.zero > 1 and not case.shard else "mode=tp tp=1 zero=2|3"
        )

    def expected(self, case: Case) -> Iterable[Term]:
        return ours.expected(case)


subject = _Subject()
