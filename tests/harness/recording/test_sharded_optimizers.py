"""Ledgers of data parallel loops: ZeRO-1 by hand, ZeroRedundancyOptimizer, DDP, FSDP2."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from harness.ledger import EITHER_GATHER
from tests.harness.recording.test_manual_updates import LR, STEPS, gradient, in_data, places
from tests.harness.recording.toy_calls import recorded

Place = tuple[str, str, int]


def mlp() -> nn.Sequential:
    """15 + 6 parameters: an odd number, so that the flat bucket of two ranks is padded."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1, bias=False), nn.Linear(1, 1))


COUNT = len(list(mlp().parameters()))
REDUCED, SENT = [("all_reduce", "grad_sync")] * COUNT, [("broadcast", "step")] * COUNT


def padded(flat: Tensor) -> Tensor:
    return torch.cat([flat, flat.new_zeros(flat.numel() % 2)])


def copy(flat: Tensor, model: nn.Module) -> None:
    start = 0
    for p in model.parameters():
        p.data.copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()


def every_step(*ops: tuple[str, str]) -> list[Place]:
    return [(op, phase, step) for step in range(STEPS) for op, phase in ops]


@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["optimizer", "by-hand"])
def test_zero_1_gathers_the_updated_parameters_in_its_step(views: bool, by_hand: bool) -> None:
    """With views the parameters lie in the flat bucket that is gathered; else they are copied from it."""

    def program(rank: int) -> None:
        model = mlp()
        flat = padded(parameters_to_vector(model.parameters()).detach())
        half = flat.numel() // 2
        if views:
            vector_to_parameters(flat, model.parameters())
        mine = flat[rank * half : (rank + 1) * half] if views else flat[rank * half : (rank + 1) * half].clone()
        optimizer = torch.optim.SGD([mine], lr=LR)
        for _step in range(STEPS):
            x = torch.ones(2, 4)
            dist.broadcast(x, 0)
            loss = model(x).sum()
            loss.backward()
            gradients = padded(torch.cat([gradient(p).flatten() for p in model.parameters()]))
            part = torch.empty(half)
            dist.reduce_scatter_tensor(part, gradients)
            norm = part.square().sum()
            dist.all_reduce(norm)
            mine.grad = part
            in_data([mine]) if by_hand else optimizer.step()  # type: ignore[list-item]
            dist.all_gather_into_tensor(flat, mine.clone())
            if not views:
                copy(flat, model)
            model.zero_grad()
            total = loss.detach()
            dist.all_reduce(total)

    # Without an optimizer and without views, nothing shows before the copy that the gathered bucket holds parameters.
    unknown = by_hand and not views
    expected = every_step(
        ("broadcast", "data"),
        ("reduce_scatter", "grad_sync"),
        ("all_reduce", "grad_sync"),
        ("all_gather", "grad_sync" if unknown else "step"),
        ("all_reduce", "metric"),
    )
    events = recorded(program)
    for rank in range(2):
        assert places(events, rank) == expected
    assert {e.op for e in events if EITHER_GATHER in e.doubts} == ({"all_gather"} if unknown else set())


@pytest.mark.parametrize("by_hand", [False, True], ids=["optimizer", "by-hand"])
def test_a_broadcast_into_a_parameter_belongs_to_the_step_and_one_of_data_to_the_next(by_hand: bool) -> None:
    """Each rank updates every other parameter and sends it; the batch that follows has the shape of a weight."""

    def program(rank: int) -> None:
        model = mlp()
        mine = list(model.parameters())[rank::2]
        optimizer = torch.optim.SGD(mine, lr=LR)
        for _step in range(STEPS):
            x = torch.ones(3, 4)
            dist.broadcast(x, 0)
            model(x).sum().backward()
            for p in model.parameters():
                dist.all_reduce(gradient(p))
            in_data(mine) if by_hand else optimizer.step()
            model.zero_grad()
            for place, p in enumerate(model.parameters()):
                dist.broadcast(p.data, place % 2)

    events = recorded(program)
    for rank in range(2):
        assert places(events, rank) == every_step(("broadcast", "data"), *REDUCED, *SENT)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
def test_zero_redundancy_optimizer_broadcasts_the_parameters_in_its_step() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415  (warns)

    def program(_rank: int) -> None:
        model = mlp()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=LR)
        for _step in range(STEPS):
            model(torch.ones(2, 4)).sum().backward()
            for p in model.parameters():
                dist.all_reduce(gradient(p))
            optimizer.step()

    assert places(recorded(program)) == every_step(*REDUCED, *SENT)


def test_ddp_reduces_in_backward_and_counts_its_steps() -> None:
    """DDP reduces its bucket in the last backward of a step alone, and agrees on new buckets once, in step 1."""

    def program(_rank: int) -> None:
        model = DistributedDataParallel(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for _step in range(STEPS):
            with model.no_sync():
                model(torch.ones(2, 4)).sum().backward()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    found = places(recorded(program))
    made = [place for place in found if place[1] == "data"]
    assert {step for _, _, step in made} == {0}
    reduced = every_step(("all_reduce", "backward"))
    agreed = [("broadcast", "forward", 1)] * 2
    assert [place for place in found if place not in made] == [*reduced[:1], *agreed, *reduced[1:]]


def test_fsdp_that_is_updated_by_hand_counts_its_steps() -> None:
    """A module in one group: gathered in forward, reduced in backward; micro-batches stay in one step."""

    def program(_rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = mlp()
        for layer in model:
            fully_shard(layer, mesh=mesh) if next(layer.parameters(), None) is not None else layer
        fully_shard(model, mesh=mesh)
        for _step in range(STEPS):
            for _micro in range(2):
                model(torch.ones(2, 4)).sum().backward()
            in_data(list(model.parameters()))
            model.zero_grad()

    events = recorded(program)
    of_a_micro = Counter((e.op, e.phase) for e in events if e.rank == 0 and (e.step, e.microbatch) == (0, 0))
    assert {op for op, phase in of_a_micro if phase == "forward"} == {"all_gather"}
    assert {op for op, phase in of_a_micro if phase == "backward"} <= {"all_gather", "reduce_scatter"}
    for step in range(STEPS):
        for micro in range(2):
            mine = [e for e in events if e.rank == 0 and (e.step, e.microbatch) == (step, micro)]
            assert Counter((e.op, e.phase) for e in mine) == of_a_micro
    assert {e.axis for e in events} == {"dp"}
