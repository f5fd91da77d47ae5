"""Where a run without an outcome ended: step, phase and module of an exception, and of calls that part.

Tests harness.running.ranks.watching.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.protocols import Subject
from shardproof.harness.running.proof import prove
from shardproof.reference.case import Case

FORWARD, BACKWARD, HOOK, BETWEEN, STEP, SHAPE, MISSING = range(7)


class Raises(torch.autograd.Function):
    """The identity, whose backward reads what forward saved, and raises where it shall."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, raises: bool) -> Tensor:
        """Its input."""
        ctx.save_for_backward(x)
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Its gradient. Raises ValueError."""
        assert len(ctx.saved_tensors) == 1  # checkpointing computes the layer again for it
        if ctx.raises:
            raise ValueError("backward")
        return gradient, None


class Layer(nn.Module):
    """A linear with a sum over the ranks behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.ending: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Raises ValueError, or sums something else on rank 1."""
        x = Raises.apply(x, self.ending == BACKWARD)
        if self.ending == FORWARD:
            raise ValueError("forward")
        if self.ending == SHAPE:
            dist.all_reduce(torch.ones(2 + dist.get_rank()))
        if self.ending != MISSING or dist.get_rank() == 0:
            dist.all_reduce(torch.ones(5))
        dist.all_reduce(torch.ones(7))
        output: Tensor = self.linear(x)
        return output


@dataclass(frozen=True)
class Ends:
    """A subject of two steps that ends in the second one, on the second of three layers."""

    ending: int

    def __call__(self, case: Case, device: torch.device) -> dict[str, Tensor]:
        """Never returns an outcome. Raises ValueError."""
        first, wrong, last = (Layer() for _ in range(3))
        layers = nn.Sequential(first, wrong, last)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for step in range(2):
            if step:
                wrong.ending = self.ending
                if self.ending == HOOK:
                    wrong.linear.weight.register_hook(_raise)
                if self.ending == STEP:
                    optimizer.register_step_pre_hook(_raise)
            layers(torch.ones(4, 6)).sum().backward()
            if step and self.ending == BETWEEN:
                _raise()
            for parameter in layers.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
        return {}


def _raise(*_: object) -> None:
    raise ValueError("here")


PLACES = {
    FORWARD: ("forward", "1"),
    BACKWARD: ("backward", "1"),
    HOOK: ("backward", ""),
    BETWEEN: ("grad_sync", ""),
    STEP: ("step", ""),
    SHAPE: ("forward", "1"),
    MISSING: ("forward", "1"),
}


@pytest.mark.parametrize("ending", PLACES)
def test_the_place_of_an_ending_is_told(ending: int) -> None:
    """Step, phase and module are those of the code in which the ranks ended or parted."""
    with InprocEngine() as engine:
        assert _place_of(Ends(ending), engine) == (1, *PLACES[ending])


class Checkpointed(nn.Module):
    """A layer that is computed again in backward, and whose Function raises behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Two linears with the Function between them."""
        output: Tensor = self.second(Raises.apply(self.first(x), True))
        return output


def checkpointed(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Never returns an outcome. Raises ValueError."""
    Whole()(torch.ones(4, 6)).sum().backward()
    return {}


class Whole(nn.Module):
    """A model that keeps only the input of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), Checkpointed())

    def forward(self, x: Tensor) -> Tensor:
        """The output of both layers."""
        output: Tensor = checkpoint(self.layers[1], self.layers[0](x), use_reentrant=False)
        return output


def test_what_recomputation_left_early_is_not_where_backward_raised() -> None:
    """Recomputation ends by an exception of its own, which is caught."""
    with InprocEngine() as engine:
        assert _place_of(checkpointed, engine) == (0, "backward", "layers.1")


def loading(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Never returns an outcome. Raises FileNotFoundError."""
    torch.load(f"nowhere/{case.seed}")
    return {}


def wrapping(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Never returns an outcome: code in a file about recomputation raises before any module ran."""
    exec(compile("raise ValueError('no such layer')", "/project/checkpointing.py", "exec"))
    return {}


@pytest.mark.parametrize(("subject", "phase"), [(loading, "checkpoint"), (wrapping, "")])
def test_what_ends_while_torch_loads_ends_in_checkpoint(subject: Subject, phase: str) -> None:
    """No module ran before. The name of a file says nothing: many recompute."""
    with InprocEngine() as engine:
        assert _place_of(subject, engine)[1:] == (phase, "")


def test_a_rank_that_is_a_process_reports_the_place_of_its_exception() -> None:
    """The place travels with the exception."""
    with PoolEngine() as engine:
        assert _place_of(Ends(BACKWARD), engine) == (1, "backward", "1")


def _place_of(subject: Subject, engine: Engine) -> tuple[int, str, str]:
    result = prove(Case.parse("tp=2"), subject, engine, timeout_s=30)
    (failed,) = result.verdicts
    assert failed.check == "run", failed.message
    assert failed.failure is not None
    where = failed.failure.where
    return where.step, where.phase, where.region
