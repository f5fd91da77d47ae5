"""Factors and offsets: which sizes of the case a factor may come from; what is said where no cause fits."""

import math

import pytest
import torch
from torch import Tensor

from shardproof.harness.checking.records import Evidence
from tests.harness.toy_evidence import case, drawn, ids_of, planted, told_by, truth

BIAS, NORM, TABLE = "grad/layers.0.mlp.w2.bias", "grad_norm/0", "init/embedding.tokens.weight"


def seen(
    values: dict[str, Tensor], text: str = "mode=tp tp=2 seq=16", true: dict[str, Tensor] | None = None
) -> Evidence:
    return planted(values, case=case(text), truth={**truth(), **(true or {})})


COUNT = {"tokens/0": torch.tensor(8)}


@pytest.mark.parametrize(
    ("values", "true", "micro", "words"),
    [
        ({TABLE: drawn(12, 6)}, {}, 2, "init 1 of 4"),
        ({"tokens/0": torch.tensor(16)}, COUNT, 1, "tokens 1 of 2"),
        ({"tokens/0": torch.tensor(11)}, COUNT, 2, "tokens 1 of 2"),
        ({NORM: truth()[NORM] * 1.7}, {}, 2, "gradient norms 1 of 2"),
    ],
)
def test_what_no_cause_fits_is_told_as_far_as_it_is_known(
    values: dict[str, Tensor], true: dict[str, Tensor], micro: int, words: str
) -> None:
    told = told_by(seen(values, f"mode=tp tp=2 seq=16 micro={micro}", true))
    assert told[4].startswith("causes: none is known; ") and told[4].endswith(f" agree with the truth; {words} do not")


W1 = "grad/layers.0.mlp.w1.weight"
ACT = "act/layers.0.mlp.w2"


def multiplied(factors: dict[str, float], micro: int = 1) -> Evidence:
    values = {name: truth()[name] * factor for name, factor in factors.items()}
    return seen(values, f"mode=tp tp=2 seq=16 micro={micro}")


@pytest.mark.parametrize(
    ("factors", "micro", "ids"),
    [
        ({BIAS: 2}, 1, ["size_factor"]),  # the ranks hold it whole: a sum over them doubles it
        ({W1: 2}, 1, ["constant_factor"]),  # each holds other rows: a sum over the ranks would mix them
        ({BIAS: 4}, 1, ["size_factor"]),
        ({BIAS: 1 / 2}, 1, ["size_factor"]),
        ({W1: 1 / 2}, 1, ["size_factor"]),  # a division needs no sum
        ({BIAS: 3}, 3, ["size_factor"]),
        ({BIAS: 2}, 2, ["size_factor"]),  # nothing decides which size
        ({ACT: 2}, 2, ["size_factor"]),  # forward knows no other micro-batch
        ({BIAS: -1}, 1, ["constant_factor"]),
        ({BIAS: 1.7}, 1, ["constant_factor"]),
        ({BIAS: 1 / (2 + 1e-7)}, 1, ["size_factor"]),  # an epsilon in its divisor
        ({BIAS: 1 / (2 + 1e-4)}, 1, ["constant_factor"]),
        ({BIAS: 2, W1: 3}, 1, ["size_factor"]),  # the first one's
        ({BIAS: 1.7, W1: 3}, 1, []),  # one bug has one factor
        ({ACT: math.sqrt(2)}, 1, ["constant_factor"]),  # roots are of norms
        ({NORM: 2}, 1, []),  # any wrong number is a factor times the right one
    ],
)
def test_factor_is_told_by_sizes_that_it_can_come_from(factors: dict[str, float], micro: int, ids: list[str]) -> None:
    assert ids_of(multiplied(factors, micro)) == ids


def test_four_losses_show_a_factor_and_three_do_not() -> None:
    for steps, causes in ((3, "none is known; "), (4, "all are 2 x the truth; 2 is the size of tp")):
        true = {f"loss/{step}": drawn().abs() + 5 + step for step in range(steps)}
        found = seen({n: 2 * loss for n, loss in true.items()}, f"mode=tp tp=2 seq=16 micro=1 steps={steps}", true)
        assert told_by(found)[4].startswith(f"causes: {causes}")


def test_a_loss_and_gradients_that_share_a_factor_show_it_together() -> None:
    gradients = [name for name in truth() if name.startswith("grad/")]
    for other, causes in (
        (2, "it and all wrong gradients are 2 x the truth; 2 is the size of tp"),
        (3, "none is known; "),
    ):
        found = multiplied({"loss/0": 2, **dict.fromkeys(gradients, 2), W1: other})
        assert told_by(found)[4].startswith(f"causes: {causes}")


@pytest.mark.parametrize(
    ("factor", "elsewhere", "ids"),
    [
        (1 / 3, {"tp=2 micro=2": 1 / 2, "tp=1 micro=3": 1}, ["size_factor"]),  # without tp that code is not run
        (1 / 3, {"tp=2 micro=2": 1, "tp=1 micro=3": 1}, []),  # that it follows a size was not seen
        (1 / 2, {"tp=2 micro=2": 1, "tp=1 micro=3": 1 / 2}, ["constant_factor"]),  # that constant, or right
        (1 / 2, {"tp=2 micro=2": 1 / 5, "tp=1 micro=3": 1 / 2}, []),
    ],
)
def test_a_factor_follows_a_size_where_its_code_is_run(
    factor: float, elsewhere: dict[str, float], ids: list[str]
) -> None:
    others = tuple(seen({BIAS: truth()[BIAS] * there}, f"mode=tp {words} seq=16") for words, there in elsewhere.items())
    assert ids_of(multiplied({BIAS: factor}, micro=3).with_found(others=others)) == ids
