"""Factors: which sizes of the case a wrong tensor's factor may come from, and when none is named."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from harness.checking.checks import CHECKS, examine
from harness.diagnosing.diagnosis import explained
from tests.harness.toy_evidence import case, evidence, outcome_of, truth

W1, BIAS = "grad/layers.0.mlp.w1.weight", "grad/layers.0.mlp.w2.bias"
ACT, NORM = "act/layers.0.mlp.w2", "grad_norm/0"
ALONE = case("mode=tp tp=2 seq=16 micro=1")
THREE = case("mode=tp tp=2 seq=16 micro=3")


def told(factors: dict[str, float], text: object = ALONE) -> list[tuple[str, str]]:
    """Ids and words of the causes when these tensors of two tensor-parallel ranks are multiplied so."""
    values: dict[str, Tensor] = {name: truth()[name] * factor for name, factor in factors.items()}
    seen = evidence(*(outcome_of(rank, {**truth(), **values}) for rank in range(2)), case=text)
    return [(cause.id, cause.words) for cause in explained(seen, examine(seen)).causes]


@pytest.mark.parametrize(
    ("factors", "text", "ids"),
    [
        ({BIAS: 2}, ALONE, ["summed_twice"]),  # the ranks hold it whole: a sum over them doubles it
        ({W1: 2}, ALONE, ["constant_factor"]),  # each holds other rows: a sum over the ranks would mix them
        ({BIAS: 4}, ALONE, ["summed_twice"]),
        ({BIAS: 1 / 2}, ALONE, ["averaged"]),
        ({W1: 1 / 2}, ALONE, ["averaged"]),  # a division needs no sum
        ({BIAS: 3}, THREE, ["constant_factor"]),
        ({BIAS: 1 / 3}, THREE, ["constant_factor"]),
        ({BIAS: 2}, case("mode=tp tp=2 seq=16 micro=2"), ["summed_twice", "constant_factor"]),  # nothing decides
        ({ACT: 2}, case("mode=tp tp=2 seq=16 micro=2"), ["summed_twice"]),  # forward knows no other micro-batch
        ({BIAS: -1}, ALONE, ["sign"]),
        ({BIAS: 1.7}, ALONE, ["constant_factor"]),
        ({BIAS: 2, W1: 3}, ALONE, ["summed_twice"]),  # the first one's
        ({BIAS: 1.7, W1: 3}, ALONE, []),  # one bug has one factor
        ({ACT: math.sqrt(2)}, ALONE, ["constant_factor"]),  # roots are of norms
        ({NORM: 2}, ALONE, ["summed_twice"]),
        ({NORM: 1.7}, ALONE, []),  # any wrong number is a factor times the right one
    ],
)
def test_a_factor_is_told_by_the_sizes_that_it_can_come_from(
    factors: dict[str, float], text: object, ids: list[str]
) -> None:
    assert [known for known, _ in told(factors, text)] == ids


def test_the_words_name_every_size_that_fits() -> None:
    ((_, words),) = told({BIAS: 1 / 3}, THREE)
    assert words == "it is 0.3333 x the truth, and micro=3: divided by it once more"
    both = case("mode=tp tp=2 dp=2 seq=16 micro=1")
    values = {**truth(), BIAS: truth()[BIAS] * 2}
    seen = evidence(*(outcome_of(rank % 2, values) for rank in range(4)), case=both)
    numbers = {check: CHECKS[check] for check in ("parameter_gradients",)}
    (cause,) = explained(seen, examine(seen, numbers)).causes
    assert (cause.id, "tp=2 or dp=2" in cause.words) == ("summed_twice", True)


def test_a_loss_over_gathered_logits_is_told_by_its_logarithm() -> None:
    def of(extra: float) -> list[str]:
        values = {**truth(), "loss/0": truth()["loss/0"] + extra}
        seen = evidence(*(outcome_of(rank, values) for rank in range(2)), case=ALONE)
        return [cause.id for cause in explained(seen, examine(seen)).causes]

    assert of(math.log(2)) == ["more_classes"]
    assert of(0.97 * math.log(2)) == []
