"""Where recorded masks lie in those of the truth: stages, rows of all data ranks together, axes; what has no place."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from harness.outcome.blocks import blocks
from harness.outcome.merging import merge
from harness.plain_case import Vocabulary
from harness.recording.capturing.dropout_masks import Draw, taken_out
from harness.running.truth.joint_masks import RankMasks, in_order, masks_of

KNOWN = Vocabulary.of({"micro": 3, "steps": 2})


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def placed(words: str, truth: list[tuple[str, tuple[int, ...]]], *ranks: list[tuple[str, Tensor]]) -> RankMasks:
    """The masks of ranks, each with its line, in those of a truth that draws these shapes."""
    case = KNOWN.parse(words)
    dense = [Draw(line, 0.5, blocks(torch.ones(shape))) for line, shape in truth]
    outcomes = [
        {f"dropout.drawn/{number}/0.5/{line}": blocks(mask) for number, (line, mask) in enumerate(rank)}
        for rank in ranks
    ]
    assert all(len(taken_out(outcome)[1]) == len(rank) for outcome, rank in zip(outcomes, ranks, strict=True))
    return masks_of(case, case.axes, dense, outcomes)


def joint(found: RankMasks) -> tuple[Tensor, ...]:
    merged = merge(found.masks)
    assert (found.problem, merged.flaws) == ("", ())
    return in_order(merged.tensors)


def test_stages_draw_for_their_own_sites_and_data_ranks_for_their_own_rows() -> None:
    """Two sites on the first stage, one on the second; the truth takes the data ranks one after the other."""
    sites = (2, 1)
    ranks = [[drawn(100 * rank + n, 5, 4) for n in range(6 * sites[rank // 2])] for rank in range(4)]
    found = placed("dp=2 pp=2", [("a.py:1", (5, 4))] * 36, *([("a.py:1", mask) for mask in own] for own in ranks))
    right = []
    for turn in range(6):
        for data_rank in range(2):
            right += [*ranks[data_rank][2 * turn : 2 * turn + 2], ranks[2 + data_rank][turn]]
    assert all(torch.equal(mask[0], own) for mask, own in zip(joint(found), right, strict=True))


def test_rows_of_all_data_ranks_may_be_one_draw_of_the_truth() -> None:
    ranks = [[("b.py:9", drawn(10 * rank + n, 5, 4)) for n in range(6)] for rank in range(3)]
    found = joint(placed("dp=3", [("a.py:1", (15, 4))] * 6, *ranks))
    assert all(
        torch.equal(mask.flatten(0, 1), torch.cat([own[turn][1] for own in ranks])) for turn, mask in enumerate(found)
    )


def test_lines_are_held_against_each_other_in_any_order() -> None:
    one, other = drawn(1, 5, 4), drawn(2, 7)
    masks = [("b.py:2", other), ("a.py:1", one)]
    found = placed("tp=1 dp=1 micro=1 steps=1", [("a.py:1", (5, 4)), ("b.py:2", (7,))], masks)
    assert [mask[0].tolist() for mask in joint(found)] == [one.tolist(), other.tolist()]
    assert set(found.masks[0]) == {"mask/0/a.py:1.0", "mask/0/b.py:2.1"}


def test_of_two_axes_a_dim_is_cut_over_the_one_whose_replicas_are_equal() -> None:
    case = KNOWN.parse("tp=4 micro=1 steps=1")
    axes = {"outer": ((0, 2), (1, 3)), "inner": ((0, 1), (2, 3))}
    parts = drawn(1, 5, 2), drawn(2, 5, 2)
    for place, right in ((lambda rank: rank // 2, "outer"), (lambda rank: rank % 2, "inner")):
        outcomes = [{"dropout.drawn/0/0.5/a.py:1": blocks(parts[place(rank)])} for rank in range(4)]
        found = masks_of(case, axes, [Draw("a.py:1", 0.5, blocks(torch.ones(5, 4)))], outcomes)
        assert torch.equal(joint(found)[0][0], torch.cat(parts, 1)), right


@pytest.mark.parametrize(
    ("words", "shape", "own", "problem"),
    [
        ("cp=2 micro=1 steps=1", (6, 4), (3, 4), r"shape \(3, 4\) on rank 0 and \(6, 4\) in the truth.* over cp"),
        ("tp=2 micro=1 steps=1", (6, 4), (2, 4), r"no cut over one axis"),
        ("tp=2 micro=2 steps=1", (6, 4), (6, 4), "draws 1 masks at a.py:1 and the ranks 1, in 1 steps of 2"),
    ],
)
def test_masks_without_a_place_are_one_sentence(
    words: str, shape: tuple[int, ...], own: tuple[int, ...], problem: str
) -> None:
    found = placed(words, [("a.py:1", shape)], *[[("a.py:1", drawn(1, *own))]] * 2)
    assert found.masks == ()
    assert re.search(problem, found.problem), found.problem
