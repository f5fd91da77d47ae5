"""Conjugate pairs keep the logical tensor forward and the logical gradient backward (`pair_laws`)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.communication import pairs
from parallel.communication.mesh import Axis
from suites.session.prover import Prover
from tests.parallel.communication.pair_laws import PAIRS, broken_pairs


@pytest.mark.parametrize("strided", [False, True])
def test_every_pair_keeps_its_law(prover: Prover, strided: bool) -> None:
    assert broken_pairs(pairs, prover.engine, strided=strided) == []


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_on_one_rank_is_nothing(prover: Prover, name: str) -> None:
    x = torch.ones(3, 6, 9)
    axis = Axis(name="tp", ranks=(0,), rank=0, group=None)
    assert PAIRS[name][0](pairs)(x, axis) is x


def test_the_moved_tensor_is_not_the_input_that_autograd_knows(prover: Prover) -> None:
    """An identity forward that returned its very input would hide the backward collective from in-place users."""

    def program(rank: int) -> Tensor:
        group = dist.new_group([0, 1], group_desc="tp")
        x = torch.ones(3, requires_grad=True)
        y = pairs.copy_to(x, Axis(name="tp", ranks=(0, 1), rank=rank, group=group))
        (y * (rank + 1)).sum().backward()
        assert x.grad is not None
        return x.grad

    for gradient in prover.engine.run(program, world_size=2):
        assert torch.equal(gradient, torch.full((3,), 3.0))
