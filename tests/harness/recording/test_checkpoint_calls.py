"""Collectives of a saved state are the phase checkpoint, those of an update stay in its step; a barrier has one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.harness.recording.toy_calls import recorded

FULL = StateDictOptions(full_state_dict=True)
SAVES: dict[str, Callable[[nn.Module, Any], object]] = {
    "whole model": lambda model, _: get_model_state_dict(model, options=FULL),
    "model and optimizer": lambda model, optimizer: get_state_dict(model, optimizer, options=FULL),
    "tensor by tensor": lambda model, _: {name: part.full_tensor() for name, part in model.state_dict().items()},
}


@pytest.mark.parametrize("how", SAVES)
def test_gathers_of_a_saved_state_are_its_own_phase(how: str) -> None:
    """All parameters are gathered between two steps, as an update does that is split over ranks."""

    def program(_rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if step == 1:
                SAVES[how](model, optimizer)

    events = [event for event in recorded(program) if event.phase not in ("forward", "backward")]
    parts = 4 * (3 if "optimizer" in how else 1)  # weights and biases; their two moments
    for rank in range(2):
        mine = [(event.op, event.phase, event.step) for event in events if event.rank == rank]
        assert mine.count(("all_gather", "checkpoint", 1)) >= parts and {where[1:] for where in mine} == {
            ("checkpoint", 1)
        }


def test_gathers_by_hand_that_the_first_update_lacks_are_a_checkpoint() -> None:
    """Shards of a flat optimizer's parameters, gathered after the second step alone; an update is like the first."""

    def program(rank: int) -> None:
        torch.manual_seed(1)
        model = nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.ones(2, 4)).sum().backward()
            dist.all_reduce(model.weight.grad)
            optimizer.step()
            if step == 1:
                dist.all_gather_into_tensor(torch.empty(16), model.weight.detach().flatten()[8 * rank : 8 * rank + 8])

    found = [(event.op, event.phase, event.step) for event in recorded(program) if event.rank == 0]
    sums = [("all_reduce", "grad_sync", step) for step in range(3)]
    assert found == [*sums[:2], ("all_gather", "checkpoint", 1), sums[2]]


def test_an_update_that_gathers_full_tensors_stays_in_its_step() -> None:
    """As Muon does: the matrix is orthogonalised whole, inside of the optimizer."""

    class Whole(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    assert parameter.grad.full_tensor().shape == parameter.shape
            return super().step(closure)

    def program(_rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=mesh)
        optimizer = Whole(model.parameters(), lr=0.1)
        for _step in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    phases = {event.phase for event in recorded(program)}
    assert phases == {"forward", "backward", "step"}


@pytest.mark.parametrize("last", ["nothing", "forward", "backward"])
def test_a_barrier_has_one_phase_whatever_a_rank_did_before_and_does_next(last: str) -> None:
    def program(rank: int) -> None:
        dist.barrier()
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _step in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            dist.barrier()
        if rank == 0 and last != "nothing":
            y: Tensor = model(torch.ones(2, 3)).sum()
            y.backward() if last == "backward" else None
        dist.barrier()

    barriers = [(event.rank, event.phase) for event in recorded(program)]
    assert barriers == [(rank, phase) for rank in range(2) for phase in ("data", "metric", "metric", "metric")]
