"""What the line of the first place adds: wrong and right ranks by their coordinates, and the modules around it."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from torch import Tensor

from harness.checking.checks import examine
from harness.checking.evidence import Evidence
from harness.diagnosing.diagnosis import explained
from tests.harness.toy_evidence import case, evidence, outcome_of, truth

BIAS, W1, W2 = "grad/layers.0.mlp.w2.bias", "act/layers.0.mlp.w1", "act/layers.0.mlp.w2"


def beside(seen: Evidence) -> tuple[str, ...]:
    return explained(seen, examine(seen)).first.beside


def wrong_on(ranks: Collection[int], text: str = "mode=tp tp=2 dp=2 seq=16", name: str = BIAS) -> tuple[str, ...]:
    """What is told when these of four ranks hold a whole tensor wrong, by 3 + its rank."""
    outcomes = [outcome_of(rank % 2, truth()) for rank in range(4)]
    for rank in ranks:
        outcomes[rank][name] = truth()[name] + 3 + rank
    return beside(evidence(*outcomes, case=case(text), events=(), expectation=None))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((1, 3), ("wrong on tp rank 1 alone, right on tp rank 0",)),
        ((2, 3), ("wrong on dp rank 1 alone, right on dp rank 0",)),
        ((3,), ("wrong on tp rank 1 of dp rank 1 alone, right on others",)),
        ((0, 3), ()),  # no coordinate tells them apart
        ((0, 1, 2, 3), ()),
    ],
)
def test_wrong_ranks_are_told_by_their_coordinates(ranks: tuple[int, ...], words: tuple[str, ...]) -> None:
    assert wrong_on(ranks) == words


def test_several_ranks_of_an_axis_are_told_together() -> None:
    assert wrong_on((1, 2, 3), "mode=tp tp=4 seq=16 heads=4") == ("wrong on tp ranks 1 2 3 alone, right on tp rank 0",)


def test_a_rank_that_is_next_to_right_is_not_called_right() -> None:
    """Off by a millionth of what the other is off by, and still wrong."""
    outcomes = [outcome_of(rank, {**truth(), BIAS: truth()[BIAS] + off}) for rank, off in enumerate((1e-4, 100.0))]
    assert beside(evidence(*outcomes)) == ()


def after(*names: str) -> tuple[str, ...]:
    values: dict[str, Tensor] = {**truth(), **{name: truth()[name] + 1 for name in names}}
    return beside(evidence(*(outcome_of(rank, values) for rank in range(2))))


def test_code_between_two_linears_is_told_by_both() -> None:
    core = "the activation function, or w2 itself"
    assert after(W2) == (f"between w1, which is right, and w2 of layers.0.mlp: {core}",)
    back = "act_grad/layers.0.mlp.w1"
    assert after(back) == (f"between w2, which is right, and w1 of layers.0.mlp: {core}",)
    assert after(W1) == ()  # the first of them
    assert after("act/head") == ()  # what stands before it has no parent in common
    assert after("act_grad/layers.0.mlp.w2") == ()  # whoever uses what the last one returned
