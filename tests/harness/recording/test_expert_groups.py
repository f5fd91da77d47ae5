"""Expert parallel traffic carries its own axis, though an axis of the case has the same ranks; in process, on gloo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.checking.evidence import PASS
from harness.checking.ledger_checks import groups
from harness.engines.engine import Engine
from harness.engines.named import engine_named
from harness.ledger import Event
from harness.running.ranks.execution import execute
from reference.case import Case
from tests.harness.recording.test_manual_updates import gradient
from tests.harness.toy_evidence import evidence

CASE = Case.parse("mode=tp tp=2 steps=2")


class Exchange(torch.autograd.Function):
    """Each rank's rows to the others and, in backward, their gradients back."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, group: dist.ProcessGroup) -> Tensor:
        """[B, D] to [B, D]."""
        ctx.group = group
        y_BD = torch.empty_like(x_BD)
        dist.all_to_all_single(y_BD, x_BD.contiguous(), group=group)
        return y_BD

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The way back is the same exchange."""
        return Exchange.apply(gradients[0], ctx.group), None


class Experts(nn.Module):
    """Dispatch, one expert a rank, combine."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.expert = nn.Linear(4, 4)

    def forward(self, x_BD: Tensor) -> Tensor:
        """[B, D] to [B, D]."""
        made: Tensor = Exchange.apply(self.expert(Exchange.apply(x_BD, self.group)), self.group)
        return made


class Described:
    """Experts over the ranks of the case's tp, in a group of this description; parameters are updated one by one."""

    def __init__(self, description: str) -> None:
        self.description = description

    def __call__(self, case: Any, device: torch.device) -> dict[str, Tensor]:
        """The loss of every step."""
        group = dist.new_group([0, 1], group_desc=self.description)
        expert_data = dist.new_group(
            [dist.get_rank()], use_local_synchronization=True, group_desc="EXPERT_DATA_PARALLEL_GROUP"
        )
        model = nn.Sequential(nn.Linear(4, 4), Experts(group))
        losses = {}
        for step in range(case.steps):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            for name, p in model.named_parameters():
                dist.all_reduce(gradient(p), group=expert_data if "expert" in name else dist.group.WORLD)
                p.data.sub_(0.1 * gradient(p))
                p.grad = None
            losses[f"loss/{step}"] = loss.detach()
        return losses


@pytest.fixture(scope="module", params=["inproc", "pool"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "pool":
        yield request.getfixturevalue("pool")
        return
    with engine_named(request.param) as made:
        yield made


def events_of(description: str, engine: Engine) -> tuple[Event, ...]:
    return execute(CASE, Described(description), engine, text="toy").events


@pytest.mark.parametrize("description", ["EXPERT_MODEL_PARALLEL_GROUP", "mesh_ep", "experts"])
def test_experts_over_the_ranks_of_tp_are_ep(description: str, engine: Engine) -> None:
    events = events_of(description, engine)
    for rank in (0, 1):
        mine = [(e.op, e.phase, e.region, e.axis, e.step) for e in events if e.rank == rank]
        step = [
            *[("all_to_all", "forward", "1", "ep")] * 2,
            *[("all_to_all", "backward", "1", "ep")] * 2,
            *[("all_reduce", "grad_sync", "", axis) for axis in ("tp", "tp", "edp", "edp")],
        ]
        assert mine == [(*place, number) for number in (0, 1) for place in step]
    found = groups(evidence(case=CASE, events=events))
    assert found is not None and found.verdict == PASS
    assert [note.split(":")[0] for note in found.unchecked] == ["group edp", "group ep"]


def test_experts_without_a_description_are_named_by_their_ranks_and_a_note_says_so(engine: Engine) -> None:
    events = events_of("", engine)
    exchanged = [event for event in events if event.op == "all_to_all"]
    assert {event.axis for event in exchanged} == {"tp"}
    assert all("its group has no description" in event.doubts[0] for event in exchanged)
