"""Large tensors are compared in blocks and small ones together, with the results of comparing each by itself."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardproof.harness.checking.measures import distance as whole_tensors
from shardproof.harness.checking.measures import many_tensors
from shardproof.harness.checking.measures.distance import Distance, distance
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.measures.many_tensors import BLOCK, Computed, compute, kind_rms, measured_together
from shardproof.harness.checking.measures.measured import MEASURES, Measured
from shardproof.harness.checking.measures.tolerance import measure
from shardproof.harness.outcome.blocks import localize
from shardproof.harness.outcome.merging import held_once, merge_outcomes
from shardproof.harness.protocols import Shard
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import drawn_weight, full, shapes
from tests.harness.toy_evidence import drawn as noise


def _in_blocks_of(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (whole_tensors, many_tensors):
        monkeypatch.setattr(module, "BLOCK", elements)


TRUTH = noise(37, 29, seed=0)
RIGHT = TRUTH * (1 + 1e-6 * noise(37, 29, seed=1))


def with_row(row: int, factor: float) -> Tensor:
    """The right tensor, with one row multiplied by this."""
    return RIGHT * torch.ones(37, 1, dtype=torch.float64).index_fill(0, torch.tensor(row), factor)


VALUES: dict[str, Tensor] = {
    "right": RIGHT,
    "float32": RIGHT.float(),
    "the same": TRUTH,
    "a wrong factor": 1.5 * RIGHT,
    "one row doubled": with_row(36, 2),
    "nan": with_row(20, torch.nan),
    "infinite": with_row(20, -torch.inf),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_blocks_measure_what_the_whole_does(value: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    truths = TRUTH, torch.zeros_like(TRUTH), 1e-200 * TRUTH
    allowed = (0.0, 0.0, None), (0.5, 1e-6, None), (0.0, 1e-6, 1e-7 * TRUTH.abs()), (0.5, 0.0, 1e-7 * TRUTH.abs())

    def found() -> list[Distance]:
        return [distance(value, truth, *least_own_slack) for truth in truths for least_own_slack in allowed]

    at_once = found()
    _in_blocks_of(100, monkeypatch)
    for one, other in zip(at_once, found(), strict=True):
        for name in MEASURES:
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-10, abs=1e-16), name


def test_complex_numbers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = torch.complex(noise(11, 13, seed=2), noise(11, 13, seed=3))
    at_once = distance(truth * (1 + 1e-3j), truth)
    _in_blocks_of(20, monkeypatch)
    assert distance(truth * (1 + 1e-3j), truth).frobenius == pytest.approx(at_once.frobenius, rel=1e-10)


def test_what_is_computed_in_blocks_is_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    before, slack = noise(37, 29, seed=7), 1e-7 * TRUTH.abs()
    value, moved = RIGHT + before, TRUTH + before

    def found() -> list[Distance]:
        truth, mine = (compute(torch.sub, after, before) for after in (moved, value))
        still = compute(torch.sub, before, before)
        loose = compute(torch.add, slack, slack)
        return [*(distance(mine, truth, own=own, slack=loose) for own in (0.0, 1e-9)), distance(still, still)]

    at_once = found()
    _in_blocks_of(100, monkeypatch)
    assert isinstance(compute(torch.sub, moved, before), Computed)
    for one, other in zip(at_once, found(), strict=True):
        for name in MEASURES:
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-10, abs=1e-16), name


def test_large_shards_become_views_of_the_merged_tensor() -> None:
    rows, small = noise(4, 2**15, seed=3), noise(8, seed=4)
    shards = [Shard(rows[2 * r : 2 * r + 2].clone(), (2 * r, 0), (4, 2**15)) for r in range(2)]
    ranks = [localize({"grad/w": shard, "grad/b": small.clone()}) for shard in shards]
    merged = merge_outcomes(ranks)
    for rank, (before, after) in enumerate(zip(ranks, held_once(ranks, merged), strict=True)):
        (own,), (view,) = before["grad/w"], after["grad/w"]
        assert torch.equal(own.local, view.local) and own.offsets == view.offsets
        assert view.local.untyped_storage().data_ptr() == merged.tensors["grad/w"].untyped_storage().data_ptr()
        assert after["grad/b"] is before["grad/b"], rank


def test_a_weight_is_drawn_once_and_every_caller_may_write_to_its_own() -> None:
    case = Case.parse("mode=tp tp=2 seed=5")
    name = next(iter(shapes(case)))
    assert drawn_weight(case, name) is drawn_weight(Case.parse("mode=tp-sp tp=2 dp=2 seed=5"), name)
    own = full(case, name)
    own.zero_()
    assert drawn_weight(case, name).any() and torch.equal(full(case, name), drawn_weight(case, name))
    assert not torch.equal(drawn_weight(case.but(seed=6), name), drawn_weight(case, name))


def _pairs(seed: int, sizes: list[int], error: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Truths of these sizes, every third a thousandth in size, and values that are off by this share of them."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    names = [f"{'grad' if number % 2 else 'act'}/{number}" for number in range(len(sizes))]
    scales = [1.0 if number % 3 else 1e-3 for number in range(len(sizes))]
    truth = {name: scale * draw(size) for name, scale, size in zip(names, scales, sizes, strict=True)}
    return {name: tensor * (1 + error * draw(tensor.shape)) for name, tensor in truth.items()}, truth


def _alone(values: Mapping[str, Tensor], truth: Mapping[str, Tensor], name: str) -> Measured:
    kind = kind_rms(truth).get(kind_of(name), 0.0)
    return measure(name, values[name], truth[name], dtype="float64", kind=kind)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    error=st.sampled_from((0.0, 1e-15, 1e-10, 1e-6, 0.5)),
)
def test_together_they_are_found_as_far_off_as_alone(seed: int, sizes: list[int], error: float) -> None:
    values, truth = _pairs(seed, sizes, error)
    for name, found in measured_together(values, truth, kind_rms(truth)).items():
        alone = _alone(values, truth, name)
        assert (found.error, found.epsilons) == pytest.approx((alone.error, alone.epsilons), rel=1e-9)
        assert replace(found, error=alone.error, epsilons=alone.epsilons, measure=alone.measure) == alone
        assert found.right == alone.right


@pytest.mark.parametrize(
    ("value", "true"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.inf])),
        (torch.zeros(2), torch.zeros(2)),
        (torch.tensor([1e-170, 0.0], dtype=torch.float64), torch.tensor([2e-170, 0.0], dtype=torch.float64)),
        (torch.ones(0), torch.ones(0)),
        (torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)),
        (torch.ones(2, dtype=torch.complex128), torch.ones(2, dtype=torch.complex128)),
        (torch.ones(BLOCK + 1), torch.ones(BLOCK + 1)),
        (torch.ones(3) * 1e-5, torch.ones(3) * 1e-5),
    ],
    ids="NaN infinite-truth zero vanishing empty integers-apart complex large small-in-its-kind".split(),
)
def test_what_needs_a_closer_look_is_left_to_measure(value: Tensor, true: Tensor) -> None:
    values, truth = {"act/odd": value, "act/usual": torch.ones(4)}, {"act/odd": true, "act/usual": torch.ones(4)}
    assert list(measured_together(values, truth, {"act": 1.0})) == ["act/usual"]


def test_equal_integers_and_groups_of_many_elements_are_found_as_alone() -> None:
    counts = {"tokens/0": torch.tensor(7)}
    assert measured_together(counts, counts, {}) == {"tokens/0": _alone(counts, counts, "tokens/0")}
    values, truth = _pairs(2, [BLOCK, 7, BLOCK - 3, 5], 1e-10)  # one group after the other
    for name, found in measured_together(values, truth, {}).items():
        alone = measure(name, values[name], truth[name], dtype="float64")
        assert found.error == pytest.approx(alone.error, rel=1e-6)


def test_tensors_of_a_kind_that_are_not_finite_do_not_count_in_its_rms() -> None:
    truth = {
        "act/a": torch.full((3,), 2.0),
        "act/b": torch.tensor([math.inf]),
        "act/c": torch.tensor([math.nan, 1.0]),
        "act/d": torch.ones(BLOCK + 1) * 2,
        "act/e": torch.ones(2, dtype=torch.int64),
        "grad/a": torch.tensor([math.nan]),
    }
    assert kind_rms(truth) == {"act": 2.0}
