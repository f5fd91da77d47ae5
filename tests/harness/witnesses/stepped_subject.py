"""A subject of several steps, each with two optimizers, and a slip in the step that the case's seed names.

Its layers change views of their input in place, which full backward hooks on modules refuse.
Its steps end with the second optimizer, which communicates; what it calls between a step and the next forward is data.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from shardproof.harness.protocols import CaseLike
from shardproof.harness.terms import Term

WIDTH = 8
CALLS = 6
"""Calls of every step on a rank: one of data, one in each direction of two layers, one of the optimizer."""


_term = partial(Term, calls=1, op="all_reduce", reduce_op="sum", axis="tp", group_size=2, dtype="float32")


class Halves(nn.Module):
    """Doubles one half of what comes in, in place, and sums over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y.view(-1, 2, WIDTH // 2)[:, 0].mul_(2.0)
        summed: Tensor = all_reduce(y)  # of the gradient too
        summed[:, : WIDTH // 2].add_(1.0)
        return summed.view(-1, WIDTH)


class _Agreeing(torch.optim.SGD):
    """Talks to the other ranks before it steps."""

    def step(self, closure: Any = None) -> Any:
        asked = torch.ones(1)
        dist.all_reduce(asked)
        return super().step(closure)


def subject(case: CaseLike, device: torch.device) -> dict[str, Tensor]:
    """Every step: data, forward, backward, two optimizers. In the step `case.seed` one call more after the data."""
    torch.manual_seed(0)
    model = nn.Sequential(Halves(), nn.Sequential(Halves())).to(device)
    first, second = model[0].parameters(), model[1].parameters()
    optimizers = [torch.optim.SGD(first, lr=1e-3), _Agreeing(second, lr=1e-3)]
    outcome: dict[str, Tensor] = {}
    for step in range(case.steps):
        batch = torch.ones(3, WIDTH, device=device)
        dist.broadcast(batch, 0)
        if step == case.seed:
            dist.broadcast(batch[:1], 0)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        outcome[f"loss/{step}"] = loss.detach()
    return outcome


def _expected(case: CaseLike) -> Iterable[Term]:
    row_bytes = WIDTH * 4
    yield _term(phase="data", region="", op="broadcast", reduce_op="", payload_bytes=3 * row_bytes, calls=case.steps)
    for phase in ("forward", "backward"):
        for region in ("0", "1.0"):
            yield _term(phase=phase, region=region, payload_bytes=3 * row_bytes, calls=case.steps)
    yield _term(phase="step", region="", payload_bytes=4, calls=case.steps)


def uneven(case: CaseLike) -> Iterable[Term]:
    """A closed form that has one call more in a run, whatever its steps."""
    yield from _expected(case)
    yield _term(phase="data", region="", op="broadcast", reduce_op="", payload_bytes=4)


subject.expected = _expected  # type: ignore[attr-defined]
