"""Parts of a model that are called outside of its forward, and engines that communicate between micro-batches."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.recording.test_manual_updates import LR, MICRO, STEPS, gradient, in_data
from tests.harness.recording.test_sharded_optimizers import padded
from tests.harness.recording.toy_calls import Part, recorded


class Talking(nn.Linear):
    """A head that sums its logits over all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] to [B, V]."""
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
    """As ZeRO-3 does: a parameter has no elements while nothing is computed with it."""

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
