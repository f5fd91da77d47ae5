"""Which modules draw random numbers, and from which rank a message comes."""

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardproof.harness.programs.tensors.messages import SENT, watch_messages
from shardproof.harness.programs.tensors.modules import ModuleValues
from shardproof.harness.programs.tensors.names import Names
from shardproof.harness.programs.tensors.store import StepValues
from shardproof.harness.programs.tensors.updates import UpdateValues
from shardproof.harness.torch_internals.autograd import told_of_replaced_results


class _Forked(nn.Module):
    """A module that computes under a random stream of its own, as Megatron's attention does."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.drop, self.linear = nn.Dropout(share), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.get_rng_state()
        torch.manual_seed(123)
        try:
            return self.drop(self.linear(x))  # type: ignore[no-any-return]
        finally:
            torch.set_rng_state(kept)


@pytest.mark.parametrize("share, drawn", [(0.0, []), (0.5, ["drop"])])
def test_a_stream_that_is_put_in_the_place_of_another_is_no_draw(share: float, drawn: list[str]) -> None:
    names = Names()
    model = _Forked(share)
    names.register(model)
    values = ModuleValues(store=StepValues(budget_bytes=2**20), names=names, guard=lambda call, *args: call(*args))
    around = [model, model.drop, model.linear]
    before = [one.register_forward_pre_hook(lambda module, _: values.look_for_draws(module)) for one in around]
    after = [one.register_forward_hook(lambda module, _, output: values.leave(module, output)) for one in around]
    values.begin_step()
    values.enter(model, "", (torch.ones(3, 2),), {})
    model(torch.ones(3, 2))
    for handle in (*before, *after):
        handle.remove()
    assert list(values.drawn) == drawn


def test_messages_are_told_by_their_global_source_and_a_sending_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    passed: list[object] = []
    room = ModuleType("torch.distributed.stand_in")
    monkeypatch.setitem(sys.modules, room.__name__, room)
    for name in ("isend", "irecv"):

        def original(*args: object, **words: object) -> None:
            passed.append((args, words))

        original.__name__ = name
        monkeypatch.setattr(dist, name, original)
        setattr(room, name, original)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: 10 * group + rank)
    watch_messages(told.append)
    tensor = torch.zeros(1)
    room.irecv(tensor, 3)
    dist.irecv(tensor, group=2, group_src=1)  # type: ignore[arg-type]
    room.irecv(tensor, group_src=0)
    dist.irecv(tensor)
    room.isend(tensor, 1)
    assert told == [3, 21, 0, SENT] and len(passed) == 5


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_loss_whose_memory_was_freed_has_the_value_that_it_had(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(StepValues, "add", lambda store, row, value: seen.append(value.item()))
    updates = UpdateValues(store=StepValues(budget_bytes=2**20), names=Names())
    with told_of_replaced_results(updates.keep_loss):
        weight = torch.ones(3, requires_grad=True)
        losses = [(weight * number).sum() for number in (1.0, 2.0)]
        weight.data = torch.zeros(3)  # no result
        for loss in losses:
            loss.data = torch.full((1,), -7.0)
        for loss in losses:
            begun = loss if scale == 1.0 else torch.tensor([scale]) * loss
            updates.take_losses([begun], [None])
            begun.backward()
        updates.take_losses([(weight * 5).sum()], [None])
        kept = (weight + 2).sum()
        kept.data = torch.tensor(5.0)
        updates.take_losses([kept + 1], [None])  # other terms: what it is now
    assert seen == [3 * scale, 6 * scale, 0.0, 6.0]
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((3,), 3 * scale))
