"""Layouts that are recognised undeclared; flaws of dtype or shape have a cause, and disturb no diagnosis."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checking.checks import examine
from harness.diagnosing.diagnosis import explanation_of
from harness.diagnosing.placing.alignments import AGREES, DIFFERS, UNKNOWN, TrueTensor, fit
from harness.diagnosing.placing.counterparts import same_modules, stages
from harness.shard import Shard
from tests.harness.toy_evidence import drawn, evidence, outcome_of, truth

AXES = {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3))}
PAIR = {"tp": ((0, 1),)}


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
    for view in (lambda x: x, lambda x: x.transpose(0, 1), lambda x: x.flatten(0, 1), lambda x: x.unflatten(2, (5, 1))):
        assert fit({rank: [view(half[rank])] for rank in (0, 1)}, target(FULL), PAIR).state == AGREES
    padded = torch.cat([FULL, drawn(6, 8, 1)], 2).chunk(2, 2)
    assert fit({rank: [padded[rank]] for rank in (0, 1)}, target(FULL), PAIR).state == AGREES
    beside = {0: [FULL], 1: [FULL * 2]}  # a second rank of nothing but padding would hide what is wrong there
    assert fit(beside, target(FULL), PAIR).state == DIFFERS


def test_micro_batches_are_rows_in_either_order() -> None:
    pieces = FULL.chunk(6, 0)
    by_rank = {0: list(pieces[:3]), 1: list(pieces[3:])}
    in_turn = {0: list(pieces[::2]), 1: list(pieces[1::2])}
    for handed in (by_rank, in_turn):
        for whole in (target(FULL), target(*pieces), target(*ROWS)):
            assert fit(handed, whole, {"dp": ((0, 1),)}).state == AGREES
        swapped = {0: handed[0][::-1], 1: handed[1]}
        assert fit(swapped, target(FULL), {"dp": ((0, 1),)}).state == DIFFERS
    other_lengths = [FULL[:2, :3], FULL[2:5, :7]]
    split = {rank: [call.tensor_split(2, 1)[rank] for call in other_lengths] for rank in (0, 1)}
    assert fit(split, target(*other_lengths), PAIR).state == AGREES


def test_equal_parts_of_a_sum_differ_and_a_constant_or_a_shape_that_fits_nothing_shows_nothing() -> None:
    assert fit({0: [FULL / 2], 1: [FULL / 2]}, target(FULL), PAIR).state == DIFFERS  # a wrong factor
    for factor, state in ((1, AGREES), (1.001, DIFFERS)):  # in a lower precision, which has limits of its own
        low = {rank: [FULL.float() * factor] for rank in (0, 1)}
        assert fit(low, target(FULL, dtype="float32"), PAIR).state == state
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


NAME = "grad/layers.0.mlp.w2.bias"
W1 = "grad/layers.0.mlp.w1.weight"


def spoiled(tensor: Tensor, number: float) -> Tensor:
    """A copy of which one element is this."""
    return tensor.index_fill(0, torch.tensor([2]), number)


PROMOTED = "a cast, or a promotion with another tensor, on some ranks and not on others"
PART = "1 of 2 parts along dim {} (tp) told as the whole: return Shard(local, "
GLOBAL = "a global_shape that ranks compute from what each holds: "
NO_NUMBER = "on rank 1 it is NaN or infinite: uninitialised memory, an overflow or a division by zero"


@pytest.mark.parametrize(
    ("name", "wrong", "known", "words"),
    [
        (NAME, lambda t: t.long(), "other_dtype", "whole numbers where fractions belong: "),
        (NAME, lambda t: t > 0, "other_dtype", "truth values where numbers belong: "),
        (NAME, lambda t: t.to(torch.complex128), "other_dtype", "complex numbers where real ones belong: "),
        (NAME, lambda t: [t, t.float()], "other_dtype", PROMOTED),
        (W1, lambda t: t[:4], "part_as_whole", PART.format(0)),
        (W1, lambda t: t[:, :3], "part_as_whole", PART.format(1)),
        (W1, lambda t: t[:5], "other_shape", "rows or columns that are missing: "),
        (W1, lambda t: torch.cat((t, t)), "other_shape", "rows or columns too many: "),
        (W1, lambda t: t.T, "other_shape", "its dims in another order: "),
        (W1, lambda t: t[None], "other_shape", "a dim too many or too few: "),
        (W1, lambda t: [Shard(t[:5], (0, 0), (8, 6)), Shard(t[5:], (4, 0), (7, 6))], "other_shape", GLOBAL),
        (W1, lambda t: [Shard(t[:4], (0, 0), (8, 6)), Shard(t[3:7], (3, 0), (8, 6))], "layout", ""),
        (NAME, lambda t: [t, spoiled(t, torch.nan)], "nan", NO_NUMBER),
        (NAME, lambda t: [t, spoiled(t, torch.inf)], "nan", NO_NUMBER),
    ],
)
def test_another_dtype_or_shape_is_told_by_what_it_looks_like(
    name: str, wrong: Callable[[Tensor], Any], known: str, words: str
) -> None:
    """`wrong` makes what both ranks return, or the list of what each does."""
    made = wrong(truth()[name])
    values = made if isinstance(made, list) else [made] * 2
    seen = evidence(*({**outcome_of(rank, truth()), name: value} for rank, value in enumerate(values)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of complex numbers taken for real ones
        (cause,) = explanation_of(seen, examine(seen)).causes
    assert cause.id == known and cause.words.startswith(words)


def test_complex_replicas_that_differ_have_a_diagnosis() -> None:
    value = truth()[NAME].to(torch.complex128)
    torn = evidence(*({**outcome_of(rank, truth()), NAME: value * 1j**rank} for rank in range(2)))
    assert explanation_of(torn, examine(torn)).first.name == NAME
