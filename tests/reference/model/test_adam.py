"""Adam out of rounding: the slack is the most that Adam makes of a gradient anywhere within its noise, and no more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference.training.adam import EPS, rounding_slack

ELEMENTS = 500


def stepped(g: Tensor, mean: Tensor, square: Tensor, step: int) -> Tensor:
    """How far torch's own Adam moves parameters of zero at lr 1 after these gradients."""
    parameter = torch.zeros_like(g, requires_grad=True)
    adam = torch.optim.AdamW([parameter], lr=1.0, weight_decay=0.0)
    parameter.grad = g.clone()
    state = {"step": torch.tensor(float(step)), "exp_avg": mean.clone(), "exp_avg_sq": square.clone()}
    adam.state[parameter] = state
    adam.step()
    return -parameter.detach()


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), step=st.integers(0, 9))
def test_the_slack_is_the_largest_change_within_the_noise(seed: int, step: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def sizes() -> Tensor:
        """Magnitudes from 1e-18 to 10, evenly by power; a fifth of them 0."""
        unit = torch.rand(2, ELEMENTS, generator=generator, dtype=torch.float64)
        return 10 ** (19 * unit[0] - 18) * (unit[1] > 0.2)

    signs = torch.randint(0, 2, (2, ELEMENTS), generator=generator) * 2 - 1
    g, noise, mean, square = sizes() * signs[0], sizes(), sizes() * signs[1] * (step > 0), sizes().square() * (step > 0)
    found, here = rounding_slack(g, noise, mean, square, step), stepped(g, mean, square, step)
    grid = [stepped(g + share * noise, mean, square, step) for share in torch.linspace(-1, 1, 41)]
    furthest = torch.stack([(at - here).abs() for at in grid]).amax(0)
    assert bool((furthest <= found * (1 + 1e-6) + 1e-12 * here.abs()).all())
    ends = torch.stack([(stepped(g + sign * noise, mean, square, step) - here).abs() for sign in (1, -1)]).amax(0)
    alone = (mean == 0) & (square == 0)  # then f grows with g throughout
    torch.testing.assert_close(found[alone], ends[alone], rtol=1e-6, atol=1e-12)


def test_away_from_zero_there_is_next_to_no_slack() -> None:
    one, nothing = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    first = rounding_slack(1e-3 * one, 1e-15 * one, nothing, nothing, 0)
    assert float(first) == pytest.approx(1e-15 * EPS / (1e-3 + EPS) ** 2, rel=1e-3, abs=1e-15)
    assert float(rounding_slack(nothing, 1e-15 * one, nothing, nothing, 0)) == pytest.approx(1e-7, rel=1e-5)
    assert float(rounding_slack(nothing, 1e-3 * one, nothing, nothing, 0)) == pytest.approx(1.0, rel=1e-4)
