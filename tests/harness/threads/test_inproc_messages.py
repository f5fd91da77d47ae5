"""Point-to-point, object and functional calls in the in-process engine, compared with their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.engines.threads.inproc import InprocEngine

gather_functional = getattr(functional, "all_gather_single", functional.all_gather_tensor)
scatter_functional = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)
gather_autograd = getattr(functional, "all_gather_single_autograd", functional.all_gather_tensor_autograd)
scatter_autograd = getattr(functional, "reduce_scatter_single_autograd", functional.reduce_scatter_tensor_autograd)


def value(rank: int) -> Tensor:
    return torch.arange(4.0) + 10 * rank


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ring_of_every_kind_of_send_and_receive(engine: InprocEngine, world_size: int) -> None:
    def program(rank: int) -> dict[str, Tensor]:
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        found = {name: torch.empty(4) for name in ("blocking", "async", "batch", "tagged", "self")}
        if rank == 0:
            dist.send(value(rank), dst=after)
            dist.recv(found["blocking"], src=before)
        else:
            dist.recv(found["blocking"], src=before)
            dist.send(value(rank), dst=after)
        works: list[Any] = [dist.isend(value(rank), dst=after), dist.irecv(found["async"], src=before)]
        batch = [dist.P2POp(dist.irecv, found["batch"], before), dist.P2POp(dist.isend, value(rank), after)]
        works += dist.batch_isend_irecv(batch)
        other = torch.empty(4)
        works += [dist.isend(value(rank), dst=after, tag=1), dist.isend(-value(rank), dst=after, tag=2)]
        works += [dist.irecv(other, src=before, tag=2), dist.irecv(found["tagged"], src=before, tag=1)]
        works += [dist.isend(value(rank), dst=rank), dist.irecv(found["self"], src=rank)]
        for work in works:
            work.wait()
        return found | {"other": -other}

    for rank, found in enumerate(engine.run(program, world_size=world_size)):
        for name, tensor in found.items():
            assert torch.equal(tensor, value(rank if name == "self" else (rank - 1) % world_size)), name


def test_a_receive_from_anybody_takes_what_was_sent_first_and_tells_the_sender(engine: InprocEngine) -> None:
    def program(rank: int) -> Any:
        if rank != 1:
            return dist.send(value(rank), dst=1)
        tensors = [torch.empty(4), torch.empty(4)]
        return [(dist.recv(tensor), tensor) for tensor in tensors]

    received = engine.run(program, world_size=3)[1]
    assert [sender for sender, _ in received] == [0, 2]
    assert all(torch.equal(tensor, value(sender)) for sender, tensor in received)


def test_works_answer_before_and_after_completion(engine: InprocEngine) -> None:
    def program(rank: int) -> list[Any]:
        tensor = value(rank)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        early = work.is_completed()
        future = work.get_future()
        return [
            early,
            work.is_completed(),
            future.value()[0] is tensor or torch.equal(future.value()[0], tensor),
            work.wait(),
        ]

    assert engine.run(program, world_size=2) == [[False, True, True, True], [True, True, True, True]]


def test_meta_tensors_pass_through_every_collective(engine: InprocEngine) -> None:
    def program(rank: int) -> list[str]:
        with torch.device("meta"):
            x, full = torch.empty(4), torch.empty(8)
            dist.all_reduce(x)
            dist.broadcast(x, src=0)
            dist.all_gather_into_tensor(full, x) if not hasattr(dist, "all_gather_single") else dist.all_gather_single(
                full, x
            )
            dist.all_to_all_single(torch.empty(4), x)
            dist.reduce_scatter(x, [torch.empty(4), torch.empty(4)])
        return [x.device.type, full.device.type]

    assert engine.run(program, world_size=2) == [["meta", "meta"]] * 2


class Seen(TorchDispatchMode):
    """Keeps the names of the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the operator and run it."""
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_the_modes_of_whoever_computes_for_all_do_not_see_the_computing(engine: InprocEngine) -> None:
    """Selective checkpointing counts operators: one more on the rank that happens to come last would break it."""

    def program(rank: int) -> list[str]:
        tensor = value(rank)
        seen = Seen()
        with seen:
            tensor.add_(1)
            dist.all_reduce(tensor)
        return seen.names

    assert engine.run(program, world_size=3) == [["add_.Tensor"]] * 3


def test_a_tensor_that_autograd_saved_must_not_be_overwritten_by_a_collective(engine: InprocEngine) -> None:
    """Stricter than gloo and NCCL, which give a wrong gradient without a word."""

    def program(rank: int) -> str:
        x = value(rank).requires_grad_()
        y = x.exp()
        dist.all_reduce(y.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        return "refused"

    assert engine.run(program, world_size=2) == ["refused", "refused"]
