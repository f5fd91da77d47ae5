"""A relu's kink: what may change when rounding decides the side, what may not, and where nothing is asked."""

from __future__ import annotations

import pytest
import torch

from reference.case import Case
from reference.training.kinks import BAND, kinks
from reference.training.subject import true_activations

RELU = Case.parse("layers=1 hidden=24 heads=4 ffn=40 seq=16 batch=3 activation=relu dtype=bfloat16 steps=1 lr=0.1")
CPU = torch.device("cpu")


@pytest.mark.parametrize("words", [{"dtype": "float64"}, {"activation": "gelu"}])
def test_nothing_may_change_without_a_kink_or_in_float64(words: dict[str, str]) -> None:
    assert kinks(RELU.but(**words), CPU, side=1) == {}


@pytest.mark.parametrize("side", [1, -1])
def test_gradients_change_exactly_where_the_input_lies_within_the_band_on_that_side(side: int) -> None:
    truth = true_activations(RELU, CPU)
    x, grad = truth["act/layers.0.mlp.w1"], truth["act_grad/layers.0.mlp.w1"]
    gap = kinks(RELU, CPU, side=side)["act_grad/layers.0.mlp.w1"]
    near = side * x / (x.square().mean().sqrt() * BAND * torch.finfo(torch.bfloat16).eps)
    # The band is of one micro-batch's rms: a little away from its border both agree.
    inside, outside = (near > 0.05) & (near < 0.8), (near < 0) | (near > 1.25)
    assert inside.sum() > 3 and not gap[outside].any()
    if side == 1:  # what was open closes
        assert torch.equal(gap[inside], -grad[inside])
    assert gap[inside].abs().max() > 0


def test_what_comes_before_the_first_update_and_what_needs_no_gradient_stays() -> None:
    gap = kinks(RELU, CPU, side=1)
    assert not any(value.any() for name, value in gap.items() if name.startswith(("act/", "logits/", "loss/")))
    assert gap["grad/layers.0.mlp.w1.weight"].any() and gap["param/layers.0.mlp.w1.weight"].any()
    assert not gap["grad/layers.0.mlp.w2.weight"].any()
