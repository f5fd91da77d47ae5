"""Steps of loops that update their parameters without torch.optim: known by parameters that change in place."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardproof.harness.checking.ledger_checks import ledger
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
    found = answer_of(ledger, evidence(case=Case.parse("mode=tp tp=2 steps=3"), events=events, expectation=None))
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
