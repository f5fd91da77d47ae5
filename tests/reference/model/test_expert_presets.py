"""Presets with experts have the published numbers of parameters, all of them and those that a token uses.

Formulas are written down from the papers' tables, apart from `shapes`: one line a part of the model.
"""

import math

import pytest

from reference.case import Case
from reference.model.parameters import shapes


def held(case: Case) -> int:
    return sum(math.prod(shape) for shape in shapes(case).values())


def used(case: Case) -> int:
    """Parameters that one token is multiplied by: of its experts, and none of the token table but its row."""
    share = case.top_k / case.experts
    numbers = {name: math.prod(shape) for name, shape in shapes(case).items()}
    experts = sum(count for name, count in numbers.items() if ".experts." in name)
    return sum(numbers.values()) - experts + int(share * experts) - numbers["embedding.tokens.weight"]


H, Q, KV, HEADS = 7168, 1536, 512, 128
ATTENTION = H * Q + Q + Q * HEADS * (128 + 64) + H * (KV + 64) + KV + KV * HEADS * (128 + 128) + HEADS * 128 * H + 2 * H
EXPERT, TABLE = 3 * H * 2048, 129280 * H
ROUTED = ATTENTION + 256 * EXPERT + EXPERT + 256 * H
"""Of one layer with experts: latent attention and two norms, 256 experts, the shared one, the router."""


def test_deepseek_v3() -> None:
    """arXiv:2412.19437, 4.2; README_WEIGHTS.md of its release: 671B, 36.7B a token, 11.5B of the module behind."""
    whole = Case.of(preset="deepseek-v3", tp=1)
    case = whole.but(prediction_depth=0)
    assert held(case) == 3 * (ATTENTION + 3 * H * 18432) + 58 * ROUTED + 2 * TABLE + H
    assert held(case) == pytest.approx(671e9, rel=0.01)
    assert used(case) == held(case) - 58 * (256 - 8) * EXPERT - TABLE
    assert used(case) == pytest.approx(36.7e9, rel=0.01)
    behind = held(whole) - held(case)
    assert behind == ROUTED + 2 * H * H + 3 * H
    assert behind == pytest.approx(11.5e9, rel=0.01)


def test_mixtral() -> None:
    """arXiv:2401.04088, table 1 and its text: 47B, 13B a token; 46.7B and 12.9B at its release (13B with the table)."""
    case = Case.of(preset="mixtral-8x7b", tp=1)
    attention, expert = 2 * 4096**2 + 2 * 4096 * 8 * 128 + 2 * 4096, 3 * 4096 * 14336
    assert held(case) == 32 * (attention + 8 * expert + 8 * 4096) + 2 * 32000 * 4096 + 4096
    assert held(case) == pytest.approx(46.7e9, rel=0.01)
    table = 32000 * 4096
    assert used(case) == held(case) - 32 * 6 * expert - table
    assert used(case) + table == pytest.approx(12.9e9, rel=0.01)


def test_a_stated_choice_ends_what_is_about_the_routers() -> None:
    case = Case.of(preset="deepseek-v3", tp=1)
    assert (case.router_groups, case.kept_groups, case.bias_rate) == (8, 4, 0.001)
    stated = Case.parse("preset=deepseek-v3 tp=1 routing=equal skew=0.25 dtype=bfloat16")
    assert (stated.router_groups, stated.kept_groups, stated.bias_rate) == (1, 1, 0.0)
    assert str(stated) == "preset=deepseek-v3 tp=1 routing=equal skew=0.25 dtype=bfloat16"
    assert Case.parse(str(stated)) == stated
    assert stated.but(routing="learned", skew=0.0, dtype="float64") == case
