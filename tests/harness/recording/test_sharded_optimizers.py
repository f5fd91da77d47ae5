"""Ledgers of data parallel loops: ZeRO by hand, ZeroRedundancyOptimizer, FSDP2; parts called outside of a model.

Engines communicate between micro-batches too. DDP is in `test_recorded_programs`.
"""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from shardproof.harness.ledger import EITHER_GATHER
from tests.harness.recording.test_manual_updates import (
    DATA,
    LR,
    MICRO,
    REDUCED,
    STEPS,
    every_step,
    gradient,
    in_data,
    places,
)
from tests.harness.recording.toy_calls import Part, recorded


def mlp() -> nn.Sequential:
    """15 + 6 parameters: an odd number, so that the flat bucket of two ranks is padded."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1, bias=False), nn.Linear(1, 1))


COUNT = len(list(mlp().parameters()))
SUMMED, SENT = [REDUCED] * COUNT, [("broadcast", "step")] * COUNT


def padded(flat: Tensor) -> Tensor:
    return torch.cat([flat, flat.new_zeros(flat.numel() % 2)])


def copy(flat: Tensor, model: nn.Module) -> None:
    start = 0
    for p in model.parameters():
        p.data.copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()


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
        DATA,
        ("reduce_scatter", "grad_sync"),
        REDUCED,
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
        assert places(events, rank) == every_step(DATA, *SUMMED, *SENT)


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

    assert places(recorded(program)) == every_step(*SUMMED, *SENT)


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


class Talking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        dist.all_reduce(y.detach())
        return y


def headless() -> Any:
    """Gives hidden states; its loss calls the head for every chunk of them, as torchtitan's chunked loss does."""
    return Part(lambda it, x: it.body(x), body=nn.Linear(4, 3), head=Talking(3, 5))


@pytest.mark.parametrize("by_hand", [False, True], ids=["optimizer", "by-hand"])
def test_a_head_that_is_called_for_every_chunk_is_no_micro_batch(by_hand: bool) -> None:
    def program(_rank: int) -> None:
        torch.manual_seed(1)
        model = headless()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for _step in range(STEPS):
            for _micro in range(MICRO):
                hidden = model(torch.ones(6, 4))
                cut = hidden.detach().requires_grad_()
                for chunk in cut.chunk(3):
                    model.head(chunk).square().mean().backward()
                hidden.backward(cut.grad)
            in_data(list(model.parameters())) if by_hand else optimizer.step()
            model.zero_grad()

    mine = [(e.step, e.microbatch, e.phase, e.region) for e in recorded(program) if e.rank == 0]
    assert mine == [(s, m, "forward", "head") for s in range(STEPS) for m in range(MICRO) for _chunk in range(3)]


def test_a_part_that_is_trained_by_itself_makes_micro_batches_of_its_own() -> None:
    """The whole model is called once, so that it is known; the steps call its head alone."""

    def program(_rank: int) -> None:
        model = headless()
        model(torch.ones(6, 4))
        optimizer = torch.optim.SGD(model.head.parameters(), lr=LR)
        model.head(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        for _step in range(STEPS):
            for _micro in range(MICRO):
                model.head(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    mine = [(e.step, e.microbatch) for e in recorded(program) if e.rank == 0]
    assert mine == [(0, 0), *((1 + step, micro) for step in range(STEPS) for micro in range(MICRO))]


@pytest.mark.parametrize("by_hand", [False, True], ids=["optimizer", "by-hand"])
def test_gradients_that_an_engine_reduces_after_every_micro_batch_are_no_data(by_hand: bool) -> None:
    """As ZeRO-2 and 3 do with the last bucket; what is broadcast there is the data of the next micro-batch."""

    def program(_rank: int) -> None:
        torch.manual_seed(1)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for _step in range(STEPS):
            for _micro in range(MICRO):
                x = torch.ones(2, 4)
                dist.broadcast(x, 0)
                model(x).square().mean().backward()
                flat = padded(torch.cat([gradient(p).flatten() for p in model.parameters()]))
                dist.reduce_scatter_tensor(torch.empty(flat.numel() // 2), flat)
                dist.all_reduce(flat)
            in_data(list(model.parameters())) if by_hand else optimizer.step()
            model.zero_grad()

    each = [("broadcast", "data"), ("reduce_scatter", "grad_sync"), ("all_reduce", "grad_sync")]
    mine = [(e.step, e.microbatch, e.op, e.phase) for e in recorded(program) if e.rank == 0]
    assert mine == [(step, micro, *one) for step in range(STEPS) for micro in range(MICRO) for one in each]


def test_parameters_that_lie_elsewhere_between_steps_are_gathered_in_the_step() -> None:
    """With ZeRO-3 a parameter has no elements while nothing is computed with it."""

    def program(rank: int) -> None:
        torch.manual_seed(1)
        model = nn.Linear(4, 3, bias=False)
        whole = model.weight.data.flatten()
        mine = whole[6 * rank : 6 * rank + 6].clone()
        model.weight.data = torch.empty(0)
        optimizer = torch.optim.SGD([mine], lr=LR)
        for _step in range(STEPS):
            model.weight.data = whole.view(3, 4)
            model(torch.ones(2, 4)).square().mean().backward()
            mine.grad = torch.empty(6)
            full = model.weight.grad
            assert full is not None
            dist.reduce_scatter_tensor(mine.grad, full.flatten())
            model.weight.grad, model.weight.data = None, torch.empty(0)
            optimizer.step()
            whole = torch.empty(12)
            dist.all_gather_into_tensor(whole, mine)

    mine = [(e.step, e.op, e.phase) for e in recorded(program) if e.rank == 0]
    each = [("reduce_scatter", "grad_sync"), ("all_gather", "step")]
    assert mine == [(step, *one) for step in range(STEPS) for one in each]
