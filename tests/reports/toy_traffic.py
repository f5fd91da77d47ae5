"""A program of two layers that talks in forward and backward, and the three ways in which tests change its traffic.

Run on real ranks and recorded, so that phase and module of what changed are found as they are for any subject.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.running.ranks.execution import execute
from shardproof.reference.case import Case
from tests.reports import sample_run

CASE = Case.parse("mode=tp tp=2 steps=3 micro=2 layers=1 hidden=16 heads=2 vocab=24 seq=8")
WAYS = ("right", "gather", "doubled", "wider")
"""Ways of the traffic; all but the first are planted.

gather: one all-gather more in the backward of layers.1. doubled: the payload of the all-reduce in the forward of
layers.0. wider: the backward all-reduce of layers.0 in float64.
"""


class _Talk(torch.autograd.Function):
    """All-reduces the given tensor, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x_BH: Tensor, way: str) -> Tensor:
        ctx.way = way
        payload = torch.cat([x_BH, x_BH]) if way == "doubled" else x_BH.clone()
        dist.all_reduce(payload)
        return payload[: len(x_BH)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad_BH = grads[0].to(torch.float64 if ctx.way == "wider" else torch.float32).contiguous()
        dist.all_reduce(grad_BH)
        if ctx.way == "gather":
            dist.all_gather_into_tensor(grad_BH.new_empty(2 * len(grad_BH), grad_BH.shape[1]), grad_BH)
        return grad_BH.to(grads[0].dtype), None


class _Layer(nn.Linear):
    def __init__(self, way: str) -> None:
        super().__init__(16, 16)
        self.way = way

    def forward(self, x_BH: Tensor) -> Tensor:
        talked: Tensor = _Talk.apply(super().forward(x_BH), self.way)
        return talked


def _subject(way: str) -> Any:
    ways = {"gather": ("", "gather"), "doubled": ("doubled", ""), "wider": ("wider", "")}.get(way, ("", ""))

    def program(case: Case, device: torch.device) -> dict[str, Tensor]:
        model = nn.Sequential(OrderedDict(layers=nn.Sequential(*map(_Layer, ways))))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(case.steps):
            for _ in range(case.micro):
                model(torch.ones(4, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {}

    return program


right, gather, doubled, wider = map(_subject, WAYS)


def stored(out: Path, way: str = "right") -> Path:
    """The run folder of this program with its traffic changed in this way; "right" changes nothing."""
    with InprocEngine() as engine:
        run = execute(CASE, _subject(way), engine, text=str(CASE))
    return sample_run.stored(out, [str(CASE)], [[*run.events]])
