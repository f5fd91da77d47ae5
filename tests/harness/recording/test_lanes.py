"""Phases of programs that are plain functions: nothing is seen of them but their calls."""

from typing import Any

import torch
import torch.distributed as dist

from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.ledger import NO_PHASE
from shardproof.harness.running.ranks.execution import execute
from shardproof.reference.case import Case

CASE = Case.parse("mode=tp tp=2 steps=1 micro=1 layers=1 hidden=16 heads=2 vocab=24 seq=8")


def test_what_autograd_computed_is_sent_in_a_forward_and_what_it_did_not_is_doubted() -> None:
    def program(case: Any, device: torch.device) -> dict[str, torch.Tensor]:
        batch, weight = torch.ones(4, 8), torch.ones(8, 8, requires_grad=True)
        dist.broadcast(batch, 0)
        y = batch @ weight
        dist.all_reduce(y)
        parts = [torch.empty_like(y) for _ in range(2)]
        dist.all_gather(parts, y.detach())
        y.sum().backward()
        assert weight.grad is not None
        dist.all_reduce(weight.grad)
        return {}

    with InprocEngine() as engine:
        run = execute(CASE, program, engine, text=str(CASE))
    found = [(event.op, event.phase, NO_PHASE in event.doubts) for event in run.events if event.rank == 0]
    assert found == [
        ("broadcast", "data", True),
        ("all_reduce", "forward", False),
        ("all_gather", "data", True),
        ("all_reduce", "data", True),
    ]
