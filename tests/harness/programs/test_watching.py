"""Training watched: one line when all is well; parted replicas, streams and gradients named, on one rank, once."""

import io
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import RequestError
from shardproof.harness.programs.watching import bits_hash, watch

WORLD = 3
Disturb = Callable[[int, int, nn.Module], object]


def watched(disturb: Disturb = lambda *_: None, *, every: int = 2, wrapped: bool = True) -> list[str]:
    """Text that every rank wrote in six steps; `disturb(rank, step, model)` comes before each optimizer step."""

    def program(rank: int) -> str:
        torch.manual_seed(5)
        model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2))
        replicas = () if wrapped else (dist.group.WORLD,)
        model = DistributedDataParallel(model) if wrapped else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        lines = io.StringIO()
        with watch(model, every=every, replicas=replicas, stream=lines):
            dist.barrier()  # hooks of optimizers are the process's, and the ranks here are its threads
            for step in range(6):
                data = torch.arange(6.0).view(2, 3) * 0.1 * (1 + rank)
                optimizer.zero_grad()
                model(data).square().mean().backward()
                disturb(rank, step, model)
                optimizer.step()
            dist.barrier()
        return lines.getvalue()

    with InprocEngine() as engine:
        return [str(one) for one in engine.run(program, world_size=WORLD)]


def first_and_only(written: list[str]) -> str:
    """Text of the one rank that wrote anything: six lines."""
    (text,) = [one for one in written if one]
    assert [line.split(":")[0] for line in text.splitlines()] == ["what", "where", "error", "first", "causes", "repeat"]
    return text


def test_one_line_when_all_is_well() -> None:
    first, *others = watched()
    told = "watch: 3 checks in 6 steps: 4 replicated parameters equal, random streams equal, gradients finite; "
    assert others == ["", ""] and re.fullmatch(told + r"[\d.]+% of the time\n", first)


def test_a_replica_that_was_changed_is_named_with_how_much() -> None:
    def change(rank: int, step: int, model: nn.Module) -> None:
        if rank == 1 and step == 2:
            with torch.no_grad():
                model.module[2].weight[1, 3] += 0.25  # type: ignore[index, union-attr]

    text = first_and_only(watched(change))
    assert "2.weight differs between its replicas: rank 1 from 0 (check replicas)" in text
    assert re.search(r"error: +0\.25 at most, where 0 is allowed; 1 of 4 parameters differ", text)
    assert "equal at the check after step 2" in text
    assert "its gradients are equal: it was initialised, or updated, differently" in text  # DDP averages them


def test_gradients_that_nobody_sums_are_the_cause() -> None:
    text = first_and_only(watched(wrapped=False))
    assert "0.weight differs between its replicas: ranks 1 2 from 0" in text
    assert "its gradients differ too: their sum over the group is missing" in text
    assert "first check" in text


def test_a_stream_that_drew_more_is_named() -> None:
    def draw(rank: int, step: int, _model: nn.Module) -> None:
        if rank == 2 and step == 4:
            torch.rand(1)

    text = first_and_only(watched(draw))
    assert "the random streams of ranks have parted: 2 from 0 (check streams)" in text
    assert "between the checks after steps 4 and 6" in text


def test_streams_that_differ_from_the_start_are_no_finding() -> None:
    written = watched(lambda rank, step, _model: torch.manual_seed(rank) if step == 0 else None)
    assert "4 replicated parameters equal, random streams unlike from the first check on, so not compared" in written[0]


def test_nothing_is_called_equal_where_nothing_was_checked() -> None:
    assert watched(every=7)[0].startswith("watch: no check in 6 steps: there is one after every 7 steps of an opti")
    lines = io.StringIO()
    with watch(nn.Linear(2, 2), every=1, stream=lines) as alone:
        alone.step()
    told = "watch: 1 check in 1 steps: no replica to compare, random streams not compared on one rank, no gradient was"
    assert lines.getvalue().startswith(told)
    with pytest.raises(RequestError, match="every=0: must be at least 1"):
        watch(nn.Linear(1, 1), every=0)


def test_a_gradient_that_is_not_finite_is_named_with_its_ranks() -> None:
    def spoil(rank: int, step: int, model: nn.Module) -> None:
        if rank and step == 3:
            next(model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]

    text = watched(spoil)[0]
    assert "the gradient of 0.weight is not finite on ranks 1 2 (check gradients)" in text


def test_replicated_dtensors_are_compared_and_sharded_ones_are_not(engine: InprocEngine) -> None:
    def program(rank: int) -> str:
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
        model = nn.Linear(3, 3)
        for name, placed in (("weight", Shard(0)), ("bias", Replicate())):
            whole = torch.arange(9.0).view(3, 3) if name == "weight" else torch.zeros(3)
            setattr(model, name, nn.Parameter(distribute_tensor(whole, mesh, [placed])))
        lines = io.StringIO()
        with watch(model, every=1, stream=lines) as watching:
            watching.step()
            if rank == 1:
                with torch.no_grad():
                    model.bias.to_local()[0] = 1.0  # type: ignore[attr-defined]
            watching.step()
        return lines.getvalue()

    text = first_and_only([str(one) for one in engine.run(program, world_size=WORLD)])
    assert "bias differs between its replicas: rank 1 from 0" in text
    assert "1 of 1 parameters differ" in text


def test_the_hash_sees_a_bit_a_place_and_a_dtype() -> None:
    torch.manual_seed(1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex128):
        tensor = torch.randn(1000).to(dtype)
        other = tensor.clone()
        assert bits_hash(tensor) == bits_hash(other)
        other[[3, 800]] = other[[800, 3]]
        assert torch.equal(tensor, other) or bits_hash(tensor) != bits_hash(other)
    assert bits_hash(torch.tensor([0.0])) != bits_hash(torch.tensor([-0.0]))
