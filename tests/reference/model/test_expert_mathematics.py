"""Tests of model/branches/experts. The dense mathematics of experts by formula; presets with experts have the published
numbers of parameters.

Formulas of presets are written down from the papers' tables, apart from `shapes`: one line a part of the model.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.model.branches.experts import (
    apply_capacity,
    choose_experts,
    losses,
    update_values,
    weights_of,
)
from shardproof.reference.model.parameters import shapes

LOGITS = torch.randn((2, 6, 8), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def case(**words: int | float | str | bool) -> Case:
    return Case.of(**{"experts": 8, "etp": 1, "tp": 1, "seq": 6, "batch": 2, **words})


def test_equal_scores_go_to_the_smaller_number() -> None:
    assert choose_experts(case(), torch.zeros(1, 1, 8))[0, 0].nonzero().flatten().tolist() == [0, 1]


def test_groups_are_kept_by_their_best_scores() -> None:
    """By all ways to keep 2 of 4 groups with 2 experts each, one expert a group."""
    one = case(router_groups=4, kept_groups=2)
    for row in LOGITS.flatten(0, 1):
        best = max(
            itertools.combinations(range(4), 2), key=lambda pair: sum(row[2 * g : 2 * g + 2].max() for g in pair)
        )
        open_to = torch.zeros(8, dtype=torch.bool)
        for group in best:
            open_to[2 * group : 2 * group + 2] = True
        must = row.masked_fill(~open_to, -math.inf).topk(2).indices
        assert choose_experts(one, row[None, None])[0, 0].nonzero().flatten().tolist() == sorted(must.tolist())


def test_a_bias_chooses_and_is_moved_towards_equal_loads() -> None:
    one = case(router="sigmoid", bias_rate=0.5)
    bias = torch.zeros(8, dtype=torch.float64)
    bias[7] = 10.0
    choice = choose_experts(one, LOGITS, bias)
    assert choice[..., 7].all()
    name = "layers.0.mlp.router.bias"
    after = update_values(one, {name: bias}, {"routing/layers.0.mlp": choice.int()})[name] - bias
    mean = choice.sum((0, 1)).double().mean()
    assert after.tolist() == [0.5 * float((mean - rows).sign()) for rows in choice.sum((0, 1))]
    assert after[7] == -0.5 and set(after.tolist()) <= {-0.5, 0.0, 0.5}


def _loss(one: Case, logits: Tensor, choice: Tensor) -> float:
    (term,) = losses(one, logits, choice)
    return float(term) / one.tokens


def test_balance_losses_by_formula() -> None:
    """Equal shares give the coefficient, all tokens on the same experts E/K times their mean scores (21.7.12)."""
    for words in ({"aux_loss": 0.3}, {"sequence_loss": 0.3}):
        one = case(**words, routing="equal", batch=2, seq=8)
        equal = torch.arange(16).view(2, 8, 1) * 2 % 8 == torch.arange(8) // 2 * 2
        assert math.isclose(_loss(one, torch.zeros(2, 8, 8, dtype=torch.float64), equal), 0.3)
    one = case(aux_loss=0.3, routing="one")
    same = (torch.arange(8) < 2).expand(2, 6, 8)
    scores = LOGITS.softmax(-1)[..., :2].mean((0, 1)).sum()
    assert math.isclose(_loss(one, LOGITS, same), 0.3 * 8 / 2 * float(scores))
    counted = torch.zeros(2, 6, dtype=torch.bool)
    counted[1, 2:4] = True
    (term,) = losses(case(aux_loss=0.3, routing="one", balance_of="counted"), LOGITS, same, counted)
    assert math.isclose(float(term), 2 * 0.3 * 8 / 2 * float(LOGITS[1, 2:4].softmax(-1)[..., :2].mean(0).sum()))
    z = LOGITS.exp().sum(-1).log().square().mean()
    assert math.isclose(_loss(case(z_loss=0.1), LOGITS, same), 0.1 * float(z))


@pytest.mark.parametrize("drop", ["score", "position"])
def test_experts_take_of_each_ranks_tokens_so_many(drop: str) -> None:
    """Two ranks hold three places of both rows each; C = ceil(6 * 2 / 8 * 1) = 2."""
    one = case(tp=2, heads=8, kv_heads=2, mode="tp-sp", capacity=1.0, drop=drop)
    choice = choose_experts(one, LOGITS)
    weights = weights_of(one, LOGITS, choice)
    left = apply_capacity(one, weights, choice)
    assert one.most_rows == 2 and (left <= choice).all() and (left < choice).any()
    for places, expert in itertools.product(((0, 1, 2), (3, 4, 5)), range(8)):
        mine = [(row, place) for row in range(2) for place in places if choice[row, place, expert]]
        by_weight = {at: -float(weights[*at, expert]) for at in mine}
        order = sorted(mine, key=by_weight.__getitem__ if drop == "score" else None)
        assert {at for at in mine if left[*at, expert]} == set(order[:2])


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
"""Parameters of one layer with experts: latent attention and two norms, 256 experts, the shared one, the router."""


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
