"""What a cause may leave of a wrong tensor: no more than its check allows, and no less than what it states allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.checking.checks import examine
from harness.checking.evidence import Evidence
from harness.diagnosing.by_numbers import by_numbers
from harness.diagnosing.diagnosis import explained
from harness.diagnosing.limits import within_limits
from harness.diagnosing.rules.causes import claimed
from harness.diagnosing.rules.patterns import partial_sums
from harness.diagnosing.rules.proofs import Explained
from harness.diagnosing.rules.sums import from_counts, from_shares
from tests.harness.toy_evidence import case, evidence, outcome_of, truth

ALONE = case("mode=tp tp=2 seq=16 micro=1")
W1, W2, BIAS = "grad/layers.0.mlp.w1.weight", "grad/layers.0.mlp.w2.weight", "grad/layers.0.mlp.w2.bias"


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen(values: dict[str, Tensor], text: Any = ALONE, **fields: Any) -> Evidence:
    return evidence(*(outcome_of(rank, {**truth(), **values}) for rank in range(2)), case=text, **fields)


def ids(found: Evidence) -> list[str]:
    return [cause.id for cause in explained(found, examine(found)).causes]


def test_a_rule_that_states_what_it_leaves_has_a_limit_of_its_own() -> None:
    """Weights that began as another rank's part and were trained since: no check would take the one for the other."""
    name, act, start = "layers.0.mlp.w1.weight", "act/layers.0.mlp.w1", drawn(8, 6)
    values = {act: drawn(2, 3, 6), f"param/{name}": start.roll(4, 0) + 1e-2 * drawn(8, 6, seed=4)}
    assert ids(seen(values, shares={f"start/{name}": start})) == ["other_shard"]


def test_one_rank_may_hold_the_whole_sum() -> None:
    true = drawn(6)
    for parts in ((true, 0 * true), (true + 1e-16 * drawn(6, seed=5), 0 * true), (0.3 * true, 0.7 * true)):
        assert [told.id for told in partial_sums(dict(enumerate(parts)), true, {"tp": 2})] == ["not_summed"]
    assert partial_sums({0: true, 1: true / 2}, true, {"tp": 2}) == []


def test_tensors_behind_the_first_one_need_not_be_as_near() -> None:
    """What comes later was computed from wrong values, and rounds otherwise; what stands first must be near."""
    later = 1e-8 * drawn(8, 6)
    for first, second, told in ((0.0, later, ["summed_twice"]), (1e-8 * drawn(6), 0 * later, [])):
        table = {BIAS: 2 * truth()[BIAS] + first, W1: 2 * truth()[W1] + second}
        causes = [
            cause
            for cause in claimed(
                "summed_twice",
                "both are 2 x the truth",
                *(Explained(value=table[n], truth=truth()[n], guess=2 * truth()[n]) for n in (BIAS, W1)),
            )
        ]
        found = seen(table)
        merged = replace(found.merged, tensors={**found.merged.tensors, **table})
        assert [cause.id for cause in within_limits(replace(found, merged=merged), causes)] == told


def test_a_factor_is_a_size_of_the_case_but_for_an_epsilon_in_its_divisor() -> None:
    assert ids(seen({BIAS: truth()[BIAS] / (2 + 1e-7)})) == ["averaged"]
    assert ids(seen({BIAS: truth()[BIAS] / (2 + 1e-4)})) == ["constant_factor"]


def test_an_element_is_measured_by_its_own_predicted_size() -> None:
    """One element of thousands is far larger than others, and is rounded where the truth has a small one."""
    name, true = "act/head", drawn(2, 100, 100)
    true[0, 0, 0] = 1e4
    guess = true.roll(50, 1)
    value = (guess * (1 + 2**-8)).bfloat16()
    known = {**truth(), name: true}
    short = {n: t.bfloat16() if t.is_floating_point() else t for n, t in {**known, name: value}.items()}
    text = case("mode=tp tp=2 seq=16 dtype=bfloat16")
    found = evidence(*(outcome_of(rank, short) for rank in range(2)), truth=known, case=text)
    proof = Explained(value=found.merged.tensors[name], truth=true, guess=guess)
    assert within_limits(found, claimed("shifted_shard", "it is shifted", proof))


def test_small_counts_that_a_rule_predicts_exactly_are_told() -> None:
    """Nine tokens of one data rank, of which the last micro-batch has five: no factor, and no chance either."""
    name, shares = "tokens/0", {"tokens": torch.tensor([[4.0, 5.0]], dtype=torch.float64)}
    ranks = (outcome_of(rank, {**truth(), name: torch.tensor(5)}) for rank in range(2))
    found = evidence(*ranks, truth={**truth(), name: torch.tensor(9)}, case=ALONE, shares=shares)
    assert [told.id for told in from_counts(found, name)] == ["micro_missing"]


def test_gradients_kept_wider_than_they_were_computed_are_judged_as_they_were() -> None:
    """Masters in float32 of gradients in float16, all eight times the truth but for rounding: a factor."""
    text = case("mode=tp tp=2 seq=16 micro=2 dtype=float16 master=float32")
    parts = drawn(1, 2, 8, 6)
    true = {**truth(), W1: parts.sum((0, 1))}
    short = {name: t.half().float() if t.is_floating_point() else t for name, t in true.items()}
    short[W1] = (8 * parts[0, 0] * 1.01 + 8 * parts[0, 1]).half().float()
    shares = {W1: parts, "tokens": torch.tensor([[4.0, 4.0]], dtype=torch.float64)}
    found = evidence(*(outcome_of(rank, short) for rank in range(2)), truth=true, case=text, shares=shares)
    assert from_shares(found, [W1]) == []
    (cause,) = by_numbers(found, [W1])
    assert (cause.id, " 8" in cause.words or " 7.9" in cause.words) == ("constant_factor", True)
