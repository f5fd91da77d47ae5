"""Steps of loops that update their parameters without torch.optim, and collectives of saved states.

Such steps are known by parameters that change in place. Collectives of a saved state have the phase checkpoint, those
of an update that of its step; a barrier has the same phase on every rank.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardproof.harness.checking.ledger_checks import check_ledger
from shardproof.harness.ledger import NO_UPDATE, Event
from shardproof.harness.verdicts.verdict import PASS
from shardproof.reference.case import Case
from tests.harness.noted import reasons_of
from tests.harness.recording.toy_calls import recorded
from tests.harness.toy_evidence import answer_of, evidence

STEPS, MICRO, LR = 3, 2, 0.1
DATA, REDUCED = ("broadcast", "data"), ("all_reduce", "grad_sync")
Place = tuple[str, str, int]
Update = Callable[[list[nn.Parameter]], object]


def gradient(parameter: Tensor) -> Tensor:
    """The gradient, which must be there."""
    assert parameter.grad is not None
    return parameter.grad


def in_data(parameters: list[nn.Parameter]) -> None:
    """Leaves the version counters as they are; the gradients add up to the last."""
    for p in parameters:
        p.data.sub_(LR * gradient(p))


def without_gradients(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for p in parameters:
            p.sub_(LR * gradient(p))
            p.grad = None


def of_several(parameters: list[nn.Parameter]) -> None:
    torch._foreach_add_([p.data for p in parameters], [gradient(p) for p in parameters], alpha=-LR)
    torch._foreach_zero_([gradient(p) for p in parameters])


def replaced(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.data = p.data - LR * gradient(p)
        p.grad = None


def nothing(_parameters: list[nn.Parameter]) -> None:
    """No update at all."""


def places(events: list[Event], rank: int = 0) -> list[Place]:
    return [(e.op, e.phase, e.step) for e in events if e.rank == rank]


def loop(update: Update) -> Callable[[int], object]:
    """Data, forward, backward by micro-batch; then the gradients, the update, and the loss of the step.

    Rows that are not looked up have no gradient, the first and the last among them.
    """

    def program(_rank: int) -> None:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
        for _step in range(STEPS):
            total = torch.zeros(())
            for _micro in range(MICRO):
                tokens = torch.tensor([1, 2])
                dist.broadcast(tokens, 0)
                loss = model(tokens).square().mean()
                loss.backward()
                total += loss.detach()
            for p in model.parameters():
                dist.all_reduce(gradient(p))
            update(list(model.parameters()))
            dist.all_reduce(total)

    return program


def every_step(*ops: tuple[str, str]) -> list[Place]:
    """These ops, each with its phase, in every step."""
    return [(op, phase, step) for step in range(STEPS) for op, phase in ops]


@pytest.mark.parametrize("update", [in_data, without_gradients, of_several, replaced])
def test_a_step_ends_where_parameters_changed_after_a_backward(update: Update) -> None:
    events = recorded(loop(update))
    for rank in range(2):
        assert places(events, rank) == every_step(*[DATA] * MICRO, *[REDUCED] * 3, ("all_reduce", "metric"))
    assert [e.microbatch for e in events if e.op == "broadcast"] == [0, 1] * STEPS * 2
    assert not [doubt for e in events for doubt in e.doubts if doubt == NO_UPDATE]


def test_gradients_that_autograd_hands_out_make_a_step_too() -> None:
    def program(_rank: int) -> None:
        model = nn.Linear(3, 2, bias=False)
        for _step in range(STEPS):
            loss = model(torch.ones(1, 3)).sum()
            (found,) = torch.autograd.grad(loss, [model.weight])
            dist.all_reduce(found)
            model.weight.data.add_(found, alpha=-LR)

    assert places(recorded(program)) == every_step(REDUCED)


def test_layers_that_are_called_one_by_one_begin_the_step_together() -> None:
    """The first of them has no element that changes where it is looked at: another one that was seen shows it."""

    def program(_rank: int) -> None:
        embedding, head = nn.Embedding(5, 3), nn.Linear(3, 2)
        for _step in range(STEPS):
            x = embedding(torch.tensor([1]))
            dist.all_reduce(x.detach())
            head(x).sum().backward()
            for p in (*embedding.parameters(), *head.parameters()):
                p.data.sub_(LR * gradient(p))

    assert places(recorded(program)) == every_step(("all_reduce", "loss"))


def test_micro_batches_without_any_update_are_one_step_and_a_note_says_so() -> None:
    events = recorded(loop(nothing))
    assert {e.step for e in events} == {0}
    assert all(NO_UPDATE in e.doubts for e in events)
    found = answer_of(check_ledger, evidence(case=Case.parse("mode=tp tp=2 steps=3"), events=events, expectation=None))
    assert found is not None
    assert (found.verdict, NO_UPDATE in reasons_of(found)) == (PASS, True)


def test_parameters_that_change_before_the_first_backward_make_no_step() -> None:
    def program(_rank: int) -> None:
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model(torch.ones(1, 3))
        nn.init.zeros_(model.weight)
        model(torch.ones(1, 3))
        dist.all_reduce(torch.ones(2))

    assert places(recorded(program)) == [("all_reduce", "loss", 0)]


def test_with_an_optimizer_its_steps_alone_count() -> None:
    """A weight that is clamped between micro-batches is no step."""

    def program(_rank: int) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for _step in range(STEPS):
            for _micro in range(MICRO):
                loss = model(torch.ones(1, 3)).sum()
                dist.all_reduce(loss.detach())
                loss.backward()
                model.weight.data.add_(0.5)
            optimizer.step()

    assert places(recorded(program)) == every_step(*[("all_reduce", "loss")] * MICRO)


def test_data_where_a_parameter_lies_later_are_no_update() -> None:
    """Memory that a replaced parameter gets may have held the data of an earlier step."""

    def program(_rank: int) -> None:
        model = nn.Linear(3, 2, bias=False)
        inputs = [torch.ones(2, 3) for _ in range(STEPS)]
        for x in inputs:
            dist.broadcast(x, 0)
            model(x).sum().backward()
            with torch.no_grad():
                updated = model.weight.sub(torch.full((2, 3), LR))
            x.copy_(updated)
            model.weight.data, model.weight.grad = x, None

    assert places(recorded(program)) == every_step(DATA)


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
    """Muon makes such an update: it orthogonalises the whole matrix inside of the optimizer."""

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
