"""Which layouts are recognised without being declared, and that wrong tensors agree under none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.diagnosing.placing.alignments import AGREES, DIFFERS, UNKNOWN, TrueTensor, fit
from harness.diagnosing.placing.names import same_modules
from harness.diagnosing.placing.tensors import stages

AXES = {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3))}
PAIR = {"tp": ((0, 1),)}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def target(*calls: Tensor, dtype: str = "float64") -> TrueTensor:
    return TrueTensor(calls=calls, dtype=dtype, kind=1.0)


FULL = drawn(6, 8, 5)
ROWS = FULL.chunk(2, 0)
NOISE = drawn(3, 8, 5) * 0.3


@pytest.mark.parametrize(
    ("layout", "parts"),
    {
        "whole": [FULL] * 4,
        "cut along dim 0 over dp": [ROWS[0], ROWS[0], ROWS[1], ROWS[1]],
        "cut along dim 1 over tp, cut along dim 0 over dp": [p for row in ROWS for p in row.chunk(2, 1)],
        "cut along dim 2 over tp, cut along dim 0 over dp": [p for row in ROWS for p in row.split([2, 3], 2)],
        "in zigzag along dim 1 over tp, cut along dim 0 over dp": [
            torch.cat([row[:, 2 * i : 2 * i + 2], row[:, 6 - 2 * i : 8 - 2 * i]], 1) for row in ROWS for i in (0, 1)
        ],
        "partial sums over tp, cut along dim 0 over dp": [p for row in ROWS for p in (row - NOISE, NOISE)],
        "cut along dim 0 over tp, cut along dim 0 over dp": [FULL[a:b] for a, b in ((0, 1), (1, 3), (3, 5), (5, 6))],
    }.items(),
)
def test_a_layout_that_nobody_declared_is_found(layout: str, parts: list[Tensor]) -> None:
    given = {rank: [part] for rank, part in enumerate(parts)}
    found = fit(given, target(FULL), AXES)
    assert (found.state, found.layout) == (AGREES, layout)
    assert found.summed == ("tp" if "sums" in layout else "")
    for rank, part in enumerate(parts):  # one wrong element on one rank is enough
        wrong = part.clone()
        wrong[0, 0, 0] += 0.01
        assert fit({**given, rank: [wrong]}, target(FULL), AXES).state == DIFFERS


def test_other_dims_and_padding_are_recognised() -> None:
    half = FULL.chunk(2, 1)
    for view in (
        Tensor.contiguous,
        lambda x: x.transpose(0, 1),
        lambda x: x.flatten(0, 1),
        lambda x: x.unflatten(2, (5, 1)),
    ):
        assert fit({rank: [view(half[rank])] for rank in (0, 1)}, target(FULL), PAIR).state == AGREES
    padded = torch.cat([FULL, drawn(6, 8, 1)], 2).chunk(2, 2)
    assert fit({rank: [padded[rank]] for rank in (0, 1)}, target(FULL), PAIR).state == AGREES
    beside = {0: [FULL], 1: [FULL * 2]}  # a second rank of nothing but padding would hide what is wrong there
    assert fit(beside, target(FULL), PAIR).state == DIFFERS


def test_micro_batches_are_rows_in_either_order() -> None:
    pieces = FULL.chunk(6, 0)
    by_rank = {0: list(pieces[:3]), 1: list(pieces[3:])}
    in_turn = {0: list(pieces[::2]), 1: list(pieces[1::2])}
    for given in (by_rank, in_turn):
        for truth in (target(FULL), target(*pieces), target(*ROWS)):
            assert fit(given, truth, {"dp": ((0, 1),)}).state == AGREES
        swapped = {0: given[0][::-1], 1: given[1]}
        assert fit(swapped, target(FULL), {"dp": ((0, 1),)}).state == DIFFERS
    other_lengths = [FULL[:2, :3], FULL[2:5, :7]]
    split = {rank: [call.tensor_split(2, 1)[rank] for call in other_lengths] for rank in (0, 1)}
    assert fit(split, target(*other_lengths), PAIR).state == AGREES


def test_equal_parts_of_a_sum_are_a_wrong_factor() -> None:
    assert fit({0: [FULL / 2], 1: [FULL / 2]}, target(FULL), PAIR).state == DIFFERS


def test_a_constant_and_a_shape_that_fits_nothing_show_nothing() -> None:
    assert fit({0: [torch.ones(4)], 1: [torch.ones(4)]}, target(torch.ones(4)), PAIR).state == UNKNOWN
    assert fit({0: [drawn(7, 8, 5)], 1: [drawn(7, 8, 5)]}, target(FULL), PAIR).state == UNKNOWN


def test_the_scale_of_a_loss_is_one_factor_of_every_rank_and_call() -> None:
    given = {0: [ROWS[0] / 7], 1: [ROWS[1] / 5]}
    axes = {"dp": ((0, 1),)}
    assert fit(given, target(FULL), axes).state == DIFFERS
    found = fit(given, target(FULL), axes, scaled=True)
    assert found.state == AGREES
    assert found.factors == pytest.approx({(0, 0): 1 / 7, (1, 0): 1 / 5})
    other = {0: [ROWS[0].square() / 7], 1: [ROWS[1].square() / 5]}
    assert fit(other, target(FULL.square()), axes, factors=found.factors).state == AGREES
    assert fit({0: [ROWS[0].abs()], 1: [ROWS[1]]}, target(FULL), axes, scaled=True).state == DIFFERS


def test_lower_precision_is_held_to_its_own_limits() -> None:
    low = {0: [FULL.float()], 1: [FULL.float()]}
    assert fit(low, target(FULL, dtype="float32"), PAIR).state == AGREES
    assert fit({rank: [x[0] * 1.001] for rank, x in low.items()}, target(FULL, dtype="float32"), PAIR).state == DIFFERS


def test_stages_of_a_pipeline_are_looked_at_apart() -> None:
    axes = {"tp": ((0, 1), (2, 3)), "pp": ((0, 2), (1, 3))}
    other = [-part for part in ROWS]  # the second stage's layer 0 is another one
    parts = {rank: [part] for rank, part in enumerate([*ROWS, *other])}
    assert fit(parts, target(FULL), axes).state == DIFFERS
    assert [fit(stage, target(FULL), axes).state for stage in stages(parts, axes)] == [AGREES, DIFFERS]
    assert stages(parts, {"tp": axes["tp"]}) == []


def test_modules_are_matched_by_equal_names_then_by_their_longest_common_end() -> None:
    mine = ["model.layers.0.mlp", "model.layers.1.mlp", "model.norm", "model.layers.0.wqkv", "head"]
    theirs = ["layers.0.mlp", "layers.1.mlp", "norm", "layers.0.wq", "layers.0.wk", "head"]
    assert same_modules(mine, theirs) == {
        "layers.0.mlp": "model.layers.0.mlp",
        "layers.1.mlp": "model.layers.1.mlp",
        "norm": "model.norm",
        "head": "head",
    }
    assert same_modules(["a.mlp", "b.mlp"], ["c.mlp"]) == {}
