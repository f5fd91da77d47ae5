"""Round trips: parameters to ranks and back, a batch to ranks and back. Exact, for every drawn case of every mode."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harness.outcome.blocks import localize
from harness.outcome.merging import merge
from parallel.communication.batch import Delivered, deliver
from parallel.communication.layout import gather, pieces, shard
from parallel.communication.mesh import Mesh, axis_rank, coordinates
from parallel.registry import MODES
from reference.data.batches import micro_batch
from suites.session.prover import Prover

CPU = torch.device("cpu")


def numbered(shape: tuple[int, ...]) -> Tensor:
    """A tensor whose elements are all different."""
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape)


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
def test_parameters_come_back_from_their_ranks(prover: Prover, mode: str, data: st.DataObject) -> None:
    case = prover.drawn(data, mode)
    ranks: list[dict[str, Any]] = [{} for _ in range(case.world_size)]
    places = MODES[mode].placements(case)
    for name, place in places.items():
        full = numbered(place.shape)
        found = [(at, shard(full, place, at)) for at in (coordinates(case, rank) for rank in range(case.world_size))]
        assert torch.equal(gather(found, place), full)
        for outcome, (at, local) in zip(ranks, found, strict=True):
            outcome[name] = pieces(local, place, at)
    merged = merge([localize(outcome) for outcome in ranks])
    assert merged.flaws == ()
    for name, place in places.items():
        assert torch.equal(merged.tensors[name], numbered(place.shape))


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
def test_a_batch_comes_back_from_its_ranks(prover: Prover, mode: str, data: st.DataObject) -> None:
    """Every rank gets its data rank's micro-batch whole; what it then cuts of the tokens makes them whole again."""
    case = prover.drawn(data, mode)
    last = case.micro - 1

    def program(rank: int) -> tuple[Delivered, Tensor]:
        mesh = Mesh.of(case)
        batch = deliver(case, mesh, 0, last, CPU)
        return batch, MODES[mode].parts(case, mesh, CPU).local(batch).tokens

    for rank, (batch, own) in enumerate(prover.engine.run(program, world_size=case.world_size)):
        sent = micro_batch(case, 0, last, axis_rank(case, "dp", rank))
        for name in ("tokens", "labels", "positions", "loss_mask"):
            assert torch.equal(getattr(batch, name), getattr(sent, name)), name
        first = axis_rank(case, "tp", rank) * own.shape[1] if own.shape != sent.tokens.shape else 0
        assert torch.equal(own, sent.tokens[:, first : first + own.shape[1]])
        assert own.shape[1] in (sent.tokens.shape[1], sent.tokens.shape[1] // case.tp)
