"""Functional collectives and DTensor on shapes alone: the ledger of a run with numbers, and each wait is seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from harness.engines.shapes.dry import DryEngine
from harness.engines.threads.inproc import InprocEngine
from harness.ledger import Event
from harness.predicting.dry_run import dry_run
from harness.running.proof import prove
from harness.running.ranks.execution import execute
from reference.case import Case

CASE = Case.parse("mode=tp tp=2 layers=1 steps=2 micro=2")
_Program = Callable[[Tensor, Any], Any]


def _splits() -> tuple[list[int], list[int]]:
    return ([1, 5], [1, 3]) if dist.get_rank() == 0 else ([3, 3], [5, 3])


def _of_tensor(x: Tensor, group: Any) -> object:
    (gathered,) = functional.all_gather_into_tensor_coalesced([x], group)
    return (
        functional.all_reduce(x, "sum", group) + 1,
        functional.all_gather_tensor(x, 0, group) + 1,
        functional.all_gather_tensor(x, 1, group) + 1,
        functional.reduce_scatter_tensor(x, "sum", 0, group) + 1,
        functional.all_to_all_single(x, _splits()[1], _splits()[0], group).view(-1) + 1,
        functional.broadcast(x, 0, group) + 1,
        functional.all_gather_tensor_autograd(x, 0, group).sum().backward(),
        gathered + 1,
        functional.wait_tensor(functional.all_reduce(x, "max", group)),
    )


def _of_dtensor(x: Tensor, group: Any) -> object:
    mesh = init_device_mesh(x.device.type, (2,))
    a = distribute_tensor(x.detach(), mesh, [Shard(1)], src_data_rank=None).requires_grad_()
    b = distribute_tensor(x.detach().T, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    product: Any = a @ b
    product.redistribute(mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).square().sum().backward()
    return a.grad, b.grad


def _of_messages(x: Tensor, group: Any) -> object:
    peer, arriving = 1 - dist.get_rank(), torch.empty_like(x)
    batch = [dist.P2POp(dist.isend, x.detach(), peer, group), dist.P2POp(dist.irecv, arriving, peer, group)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return arriving + 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [_of_tensor, _of_dtensor, _of_messages], ids=lambda program: program.__name__)
def test_every_call_is_seen_and_every_use_of_its_result_is_its_wait(
    program: _Program, dry: DryEngine, engine: InprocEngine
) -> None:
    def subject(case: Case, device: torch.device) -> dict[str, Tensor]:
        program(torch.ones(6, 4, device=device, requires_grad=True), dist.group.WORLD)
        return {}

    ranks = dry_run(CASE, subject, dry, (0, 1), text="")
    events = execute(CASE, subject, engine, text="").events
    assert [verdict.check for verdict in prove(CASE, subject, dry).verdicts if verdict.verdict != "pass"] == []
    assert [_told(e) for rank in ranks for e in rank.events] == [_told(e) for e in events] != []
    assert [rank.unwaited for rank in ranks] == [(), ()]


def _told(event: Event) -> tuple[object, ...]:
    """All that depends neither on the clock nor on the device."""
    left_out = ("start_us", "duration_us", "device")
    return tuple(getattr(event, name) for name in Event.__slots__ if name not in left_out)


@pytest.mark.filterwarnings("ignore")
def test_a_functional_result_that_is_dropped_or_only_viewed_was_never_waited_for(dry: DryEngine) -> None:
    def subject(case: Case, device: torch.device) -> dict[str, Tensor]:
        x = torch.ones(6, 4, device=device)
        world: Any = dist.group.WORLD
        functional.reduce_scatter_tensor(x, "sum", 0, world).view(-1)
        return {"loss/0": functional.all_reduce(x, "sum", world).sum()}

    result = prove(CASE, subject, dry)
    (failed,) = [verdict for verdict in result.verdicts if verdict.verdict == "fail"]
    assert failed.check == "waits"
    assert "reduce_scatter #0 of tp (2 ranks) at " in failed.message and "all_reduce" not in failed.message


@pytest.mark.parametrize(
    "program",
    [
        torch.unique,
        lambda x: torch.equal(x, x + 1),
        lambda x: torch.rand(3, generator=torch.Generator(x.device), device=x.device),
    ],
    ids=["unique", "equal", "own generator"],
)
def test_what_shapes_alone_cannot_run_is_unknown_in_one_sentence(
    program: Callable[[Tensor], object], dry: DryEngine
) -> None:
    def subject(case: Case, device: torch.device) -> dict[str, Tensor]:
        program(torch.ones(3, device=device))
        return {}

    (verdict,) = prove(CASE, subject, dry).verdicts
    assert (verdict.check, verdict.verdict) == ("run", "unknown")
    assert "\n" not in verdict.message and "legal: --engine inproc" in verdict.message
    assert verdict.message.startswith("rank 0 of 2 cannot go on with shapes alone, at ")
