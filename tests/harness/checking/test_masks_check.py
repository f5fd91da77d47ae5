"""The check of dropout masks: exact tests are valid and exact, and each finds what it is there for."""

from __future__ import annotations

from fractions import Fraction
from math import comb
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checking.evidence import FAIL, PASS, UNKNOWN, Finding
from harness.checking.mask_checks import binomial, hypergeometric, masks
from harness.shard import Shard
from tests.harness.toy_evidence import case, evidence

CASE = case("mode=tp-sp tp=2 seq=16 dropout=0.25 random=stateful")


def two_sided(terms: dict[int, Fraction]) -> dict[int, float]:
    below = {k: sum(terms[j] for j in terms if j <= k) for k in terms}
    above = {k: sum(terms[j] for j in terms if j >= k) for k in terms}
    return {k: float(min(Fraction(1), 2 * min(below[k], above[k]))) for k in terms}


def of_binomial(n: int, p: Fraction) -> dict[int, Fraction]:
    return {k: comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)}


def of_overlap(n: int, a: int, b: int) -> dict[int, Fraction]:
    least, most = max(0, a + b - n), min(a, b)
    return {k: Fraction(comb(a, k) * comb(n - a, b - k), comb(n, b)) for k in range(least, most + 1)}


@pytest.mark.parametrize(("n", "p"), [(1, Fraction(1, 2)), (7, Fraction(9, 10)), (40, Fraction(1, 3))])
def test_binomial_probabilities_are_exact_and_valid(n: int, p: Fraction) -> None:
    terms = of_binomial(n, p)
    found = {k: binomial(k, n, float(p)) for k in terms}
    assert found == pytest.approx(two_sided(terms), rel=1e-9)
    assert all(sum(float(terms[k]) for k in terms if found[k] <= limit) <= limit for limit in (0.5, 0.1, 1e-3, 1e-9))


@pytest.mark.parametrize(("n", "a", "b"), [(5, 2, 3), (30, 27, 26), (40, 11, 23), (6, 6, 2)])
def test_overlap_probabilities_are_exact_and_valid(n: int, a: int, b: int) -> None:
    terms = of_overlap(n, a, b)
    found = {k: hypergeometric(k, n, a, b) for k in terms}
    assert found == pytest.approx(two_sided(terms), rel=1e-9)
    assert all(sum(float(terms[k]) for k in terms if found[k] <= limit) <= limit for limit in (0.5, 0.1, 1e-3, 1e-9))


def test_large_counts_neither_overflow_nor_take_long() -> None:
    assert binomial(9_000_000, 10_000_000, 0.9) == 1.0
    assert 0 < binomial(9_005_000, 10_000_000, 0.9) < 1e-6
    assert hypergeometric(9_000_000, 10_000_000, 9_000_000, 9_000_000) == 0.0


def drawn(seed: int, *shape: int, rate: float = 0.25) -> Tensor:
    return torch.rand(shape or (4, 8, 20), generator=torch.Generator().manual_seed(seed)) >= rate


def looked_at(*ranks: dict[str, Tensor], dim: int = 1, **changes: Any) -> Finding:
    """The finding for masks that each rank holds its part of, along `dim`."""
    outcomes = []
    for rank, held in enumerate(ranks):
        outcome = {}
        for name, mask in held.items():
            size = list(mask.shape)
            size[dim] *= len(ranks)
            offsets = tuple(rank * mask.shape[d] if d == dim else 0 for d in range(mask.dim()))
            outcome[name] = Shard(mask, offsets, tuple(size))
        outcomes.append(outcome)
    names = tuple(ranks[0])
    found = masks(evidence(*outcomes, **{"case": CASE, "truth": {}, "given": names, **changes}))
    assert found is not None
    return found


NAME, NEXT = "mask/0/embedding", "mask/1/embedding"


def test_independent_masks_pass() -> None:
    found = looked_at({NAME: drawn(1), NEXT: drawn(2)}, {NAME: drawn(3), NEXT: drawn(4)})
    assert (found.verdict, found.unchecked) == (PASS, ())
    assert "8 exact tests of 2 masks find none improbable; the dense model was given them" in found.message


def test_equal_masks_of_different_shards_fail_and_of_different_samples_pass() -> None:
    equal = {NAME: drawn(1)}, {NAME: drawn(1)}
    found = looked_at(*equal)
    assert (found.verdict, found.names, found.ranks) == (FAIL, (NAME,), (0, 1))
    assert "ranks 0 and 1, which hold different shards, agree in 640 of 640 elements" in found.message
    assert looked_at(*equal, dim=0).verdict == PASS


def test_half_equal_masks_fail_too() -> None:
    one, other = drawn(1), drawn(2)
    other[:2] = one[:2]
    assert looked_at({NAME: one}, {NAME: other}).verdict == FAIL


def test_a_mask_that_is_drawn_twice_fails() -> None:
    found = looked_at({NAME: drawn(1), NEXT: drawn(2)}, {NAME: drawn(3), NEXT: drawn(3)})
    assert (found.verdict, found.names, found.ranks) == (FAIL, (NEXT,), (1,))
    assert "a mask was drawn twice" in found.message


def test_a_mask_that_two_stages_draw_fails() -> None:
    stages = case("mode=tp tp=1 pp=2 layers=2 seq=16 dropout=0.25 random=stateful")
    found = looked_at({NAME: drawn(1)}, {NEXT: drawn(1)}, case=stages, given=(NAME, NEXT))
    assert (found.verdict, found.names, found.ranks) == (FAIL, (NEXT,), (0, 1))
    assert f"{NEXT} on rank 1 (draw 1) is that of {NAME} on rank 0 (draw 0)" in found.message
    assert looked_at({NAME: drawn(1)}, {NEXT: drawn(2)}, case=stages, given=(NAME, NEXT)).verdict == PASS


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_another_rate_fails(rate: float) -> None:
    found = looked_at({NAME: drawn(1, rate=rate)}, {NAME: drawn(2, rate=rate)})
    assert (found.verdict, found.names) == (FAIL, (NAME,))
    assert "elements on rank 0, and its rate of dropout is 0.25" in found.message


def test_masks_are_of_bool() -> None:
    found = looked_at({NAME: drawn(1).double()}, {NAME: drawn(2).double()})
    assert (found.verdict, found.names) == (FAIL, (NAME,))
    assert "must be a tensor of bool" in found.message


def test_masks_too_small_to_show_anything_are_no_pass() -> None:
    found = looked_at({NAME: drawn(1, 2, 2, 2)}, {NAME: drawn(2, 2, 2, 2)})
    assert found.verdict == UNKNOWN
    assert found.unchecked == ("3 of 3 tests of masks, too small to show anything",)


def test_masks_that_the_dense_model_knows_are_compared_bit_for_bit() -> None:
    """One wrong element of a right field."""
    whole = torch.cat([drawn(1), drawn(2)], 1)
    wrong = drawn(2)
    wrong[3, 7, 19] = ~wrong[3, 7, 19]
    assert looked_at({NAME: drawn(1)}, {NAME: drawn(2)}, truth={NAME: whole}, given=()).verdict == PASS
    found = looked_at({NAME: drawn(1)}, {NAME: wrong}, truth={NAME: whole}, given=())
    assert (found.verdict, found.names) == (FAIL, (NAME,))


def test_nothing_is_claimed_without_masks() -> None:
    assert masks(evidence({"loss/0": torch.ones(())})) is None
