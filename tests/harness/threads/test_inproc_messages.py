"""Point-to-point, object and functional calls in the in-process engine, compared with their definitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group
from torch.utils._python_dispatch import TorchDispatchMode

from harness.engines.threads.inproc import InprocEngine

gather_functional = getattr(functional, "all_gather_single", functional.all_gather_tensor)
scatter_functional = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)
gather_autograd = getattr(functional, "all_gather_single_autograd", functional.all_gather_tensor_autograd)
scatter_autograd = getattr(functional, "reduce_scatter_single_autograd", functional.reduce_scatter_tensor_autograd)


@pytest.fixture(scope="module")
def engine() -> Iterator[InprocEngine]:
    with InprocEngine() as made:
        yield made


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


def test_group_ranks_of_peers_are_those_of_the_group(engine: InprocEngine) -> None:
    def program(rank: int) -> Any:
        group = dist.new_group([1, 3])
        if rank == 1:
            dist.send(value(rank), dst=3, group=group)
        if rank == 3:
            tensor = torch.empty(4)
            return dist.recv(tensor, group=group), tensor
        return None

    sender, tensor = engine.run(program, world_size=4)[3]
    assert sender == 1 and torch.equal(tensor, value(1))


def test_object_collectives_carry_any_picklable_object(engine: InprocEngine) -> None:
    def program(rank: int) -> dict[str, Any]:
        mine = {"rank": rank, "text": "x" * (10 * rank)}
        everyone: list[Any] = [None] * 3
        dist.all_gather_object(everyone, mine)
        spread = [mine, rank]
        dist.broadcast_object_list(spread, src=1)
        gathered: list[Any] | None = [None] * 3 if rank == 2 else None
        dist.gather_object(mine, gathered, dst=2)
        part: list[Any] = [None]
        dist.scatter_object_list(part, [f"part {i}" for i in range(3)] if rank == 0 else None, src=0)
        message: list[Any] = [None]
        if rank == 0:
            dist.send_object_list([mine], dst=2)
        if rank == 2:
            dist.recv_object_list(message, src=0)
        return {"everyone": everyone, "spread": spread, "gathered": gathered, "part": part, "message": message}

    sent = [{"rank": rank, "text": "x" * (10 * rank)} for rank in range(3)]
    for rank, found in enumerate(engine.run(program, world_size=3)):
        assert found["everyone"] == sent
        assert found["spread"] == [sent[1], 1]
        assert found["gathered"] == (sent if rank == 2 else None)
        assert found["part"] == [f"part {rank}"]
        assert found["message"] == ([sent[0]] if rank == 2 else [None])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_functional_collectives(engine: InprocEngine, world_size: int) -> None:
    def program(rank: int) -> dict[str, list[Tensor]]:
        world = _get_default_group()
        long = torch.arange(2.0 * world_size) + rank
        found = {
            "sum": functional.all_reduce(value(rank), "sum", world),
            "mean": functional.all_reduce(value(rank), "avg", world.group_name),
            "gathered": gather_functional(value(rank), 0, world),
            "scattered": scatter_functional(long, "sum", 0, world),
            "exchanged": functional.all_to_all_single(long, None, None, world),
            "spread": functional.broadcast(value(rank), world_size - 1, world),
        }
        several = functional.all_reduce_coalesced([value(rank), long], "max", world)
        in_place = value(rank)
        torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce_(in_place, "sum", world.group_name)
        )
        return {name: [tensor + 0] for name, tensor in found.items()} | {
            "several": list(several),
            "in_place": [in_place],
        }

    ranks = range(world_size)
    total = torch.stack([value(rank) for rank in ranks]).sum(0)
    longs = [torch.arange(2.0 * world_size) + rank for rank in ranks]
    for rank, found in enumerate(engine.run(program, world_size=world_size)):
        assert torch.equal(found["sum"][0], total) and torch.equal(found["in_place"][0], total)
        assert torch.equal(found["mean"][0], total / world_size)
        assert torch.equal(found["gathered"][0], torch.cat([value(other) for other in ranks]))
        assert torch.equal(found["scattered"][0], torch.stack(longs).sum(0)[2 * rank : 2 * rank + 2])
        assert torch.equal(found["exchanged"][0], torch.cat([long[2 * rank : 2 * rank + 2] for long in longs]))
        assert torch.equal(found["spread"][0], value(world_size - 1))
        assert torch.equal(found["several"][0], value(world_size - 1))
        assert torch.equal(found["several"][1], longs[-1])


def test_gradients_of_functional_collectives_are_their_conjugates(engine: InprocEngine) -> None:
    def program(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        world = _get_default_group()
        weight = torch.arange(8.0) * (rank + 1)
        short, long, rows = (
            value(rank).requires_grad_(),
            weight.clone().requires_grad_(),
            weight.clone().requires_grad_(),
        )
        (gather_autograd(short, 0, world) * weight).sum().backward()
        (scatter_autograd(long, "sum", 0, world) * value(rank)).sum().backward()
        (functional.all_to_all_single_autograd(rows, [4, 4], [4, 4], world) * weight).sum().backward()
        gradients = (short.grad, long.grad, rows.grad)
        assert all(gradient is not None for gradient in gradients)
        return gradients  # type: ignore[return-value]

    weights = [torch.arange(8.0), torch.arange(8.0) * 2]
    for rank, (gathered, scattered, exchanged) in enumerate(engine.run(program, world_size=2)):
        assert torch.equal(gathered, (weights[0] + weights[1])[4 * rank : 4 * rank + 4])
        assert torch.equal(scattered, torch.cat([value(0), value(1)]))
        assert torch.equal(exchanged, torch.cat([weight[4 * rank : 4 * rank + 4] for weight in weights]))


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


def test_inference_tensors_and_leaves_that_require_gradients_are_reduced_in_place(engine: InprocEngine) -> None:
    def program(rank: int) -> tuple[Tensor, Tensor]:
        leaf = value(rank).requires_grad_()
        dist.all_reduce(leaf)
        if rank == 0:
            with torch.inference_mode():
                frozen = value(rank)
                dist.all_reduce(frozen)
        else:
            frozen = value(rank)
            dist.all_reduce(frozen)
        return leaf.detach(), frozen

    for leaf, frozen in engine.run(program, world_size=2):
        assert torch.equal(leaf, value(0) + value(1)) and torch.equal(frozen, value(0) + value(1))
