"""The raw collectives: any dim, any memory layout, any number of ranks, and what they issue."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel.communication import collectives
from parallel.communication.mesh import Axis, Mesh
from reference.case import Case
from tests.parallel.ranks import Calls, along_tp, numbers, on_ranks

RANKS = 3
FULL = numbers(6, 9, 12)


def _strided(x: Tensor) -> Tensor:
    """The same numbers in memory that is contiguous nowhere."""
    return torch.stack((x, -x), -1)[..., 0]


@pytest.mark.parametrize(("op", "expected"), [("sum", FULL * 6), ("max", torch.maximum(FULL, FULL * 3))])
def test_all_reduce_of_strided_memory_returns_the_reduction_and_leaves_its_input(op: str, expected: Tensor) -> None:
    def program(axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
        mine = _strided(FULL * (axis.rank + 1))
        before = mine.clone()
        return collectives.all_reduce(mine, axis, op=op), mine, before

    for reduced, mine, before in along_tp(RANKS, program):
        torch.testing.assert_close(reduced, expected, rtol=1e-14, atol=0)
        assert torch.equal(mine, before)


def test_one_rank_issues_nothing_but_the_broadcast() -> None:
    calls = Calls()

    def program(axis: Axis) -> list[Tensor]:
        return [
            collectives.all_reduce(FULL, axis),
            collectives.all_gather(FULL, axis, dim=1),
            collectives.reduce_scatter(FULL, axis, dim=1),
            collectives.all_to_all(FULL, axis, split_dim=0, gather_dim=1),
            collectives.own_slice(FULL, axis, dim=0),
            collectives.broadcast(FULL, axis),
        ]

    (results,) = along_tp(1, program, observer=calls)
    assert all(torch.equal(result, FULL) for result in results)
    assert calls.ops() == ["broadcast"]


def test_a_dim_that_does_not_divide_is_named_with_a_legal_length() -> None:
    def program(axis: Axis) -> str:
        with pytest.raises(ValueError, match="dim=0: its length 4 must be a multiple of the 3 ranks.*legal: 6"):
            collectives.own_slice(numbers(4, 2), axis, dim=0)
        return "raised"

    assert along_tp(RANKS, program) == ["raised"] * RANKS


def test_groups_follow_the_cases_axes_and_unknown_axes_are_refused() -> None:
    case = Case.of(tp=2, dp=3)

    def program(rank: int) -> tuple[int, tuple[int, ...], int, tuple[int, ...]]:
        mesh = Mesh.of(case)
        with pytest.raises(ValueError, match="axis=wp: is not an axis.*legal: tp cp dp pp"):
            mesh.axis("wp")
        tp, dp = mesh.axis("tp"), mesh.axis("dp")
        return tp.rank, tp.ranks, dp.rank, dp.ranks

    found = on_ranks(6, program)
    assert found[3] == (1, (2, 3), 1, (1, 3, 5))
    assert [tp_rank + 2 * dp_rank for tp_rank, _, dp_rank, _ in found] == list(range(6))


def test_a_world_of_another_size_than_the_cases_is_refused() -> None:
    def program(axis: Axis) -> str:
        with pytest.raises(ValueError, match="world_size=2: the case needs .*=4 ranks"):
            Mesh.of(Case.of(tp=4, kv_heads=4))
        return "raised"

    assert along_tp(2, program) == ["raised", "raised"]
