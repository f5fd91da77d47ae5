"""Tolerances: every local or diffuse error is seen, honest rounding passes, nothing that is not finite ever does."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardproof.harness.checking.measures.distance import TruthTensor, distance
from shardproof.harness.checking.measures.many_tensors import kind_rms
from shardproof.harness.checking.measures.measured import ABSOLUTE, Measured, epsilon
from shardproof.harness.checking.measures.tolerance import least_rms, measure
from shardproof.harness.checking.measuring import compare_with_truth, sizes_of
from tests.harness.toy_evidence import drawn, planted

seeds = st.integers(0, 2**31)
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


def right(value: Tensor, truth: Tensor, dtype: str = "float64", *controls: Tensor) -> bool:
    return measure("x", value, truth, dtype=dtype, controls=controls).right


@given(seeds, shapes, st.floats(-12, 12))
def test_honest_float64_noise_passes_at_any_magnitude(seed: int, shape: tuple[int, ...], exponent: float) -> None:
    truth = drawn(*shape, seed=seed) * 10.0**exponent
    noise = drawn(*shape, seed=seed + 1) * 1e-13 * truth.abs().max()
    assert right(truth + noise, truth)


def test_a_count_that_rounding_changes_may_be_as_many_times_further_off_as_a_number() -> None:
    truth, near = torch.tensor(40), torch.tensor(41)
    amplified = measure("x", torch.tensor(47), truth, dtype="bfloat16", amplified=[torch.tensor(33)])
    assert amplified.right and not amplified.decidable
    assert right(torch.tensor(34), truth, "bfloat16", truth, near)
    assert not right(torch.tensor(47), truth, "bfloat16", truth, near)
    assert not right(torch.tensor(39), truth, "bfloat16", truth, truth)


@given(seeds, st.integers(2, 4000), st.integers(0, 10**9))
def test_one_wrong_row_of_a_big_tensor_fails(seed: int, rows: int, which: int) -> None:
    truth = drawn(rows, 8, seed=seed)
    value = truth.clone()
    value[which % rows] = truth[(which + 1) % rows]
    assert not right(value, truth)


@given(seeds, shapes, st.integers(0, 10**9), st.sampled_from([0.5, 2.0, 4.0, 1.01, -1.0, 0.0]))
def test_one_flipped_sign_fails_and_so_does_a_wrong_factor(
    seed: int, shape: tuple[int, ...], which: int, factor: float
) -> None:
    truth = drawn(*shape, seed=seed)
    value = truth.clone().flatten()
    value[which % value.numel()] *= -1
    assert not right(value.reshape(shape), truth)
    assert not right(truth * factor, truth)


@given(seeds, shapes, st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 10**9), st.booleans())
def test_nothing_that_is_not_finite_passes(
    seed: int, shape: tuple[int, ...], bad: float, which: int, in_truth: bool
) -> None:
    clean = drawn(*shape, seed=seed)
    spoiled = clean.clone().flatten()
    spoiled[which % spoiled.numel()] = bad
    spoiled = spoiled.reshape(shape)
    assert not right(*((clean, spoiled) if in_truth else (spoiled, clean)))
    assert right(spoiled, spoiled) == math.isinf(bad), "an infinity of the truth's own is a mask"
    for dtype in ("float32", "bfloat16"):
        assert not right(spoiled, clean, dtype, spoiled)


@pytest.mark.parametrize("elements", [12, 2**18 + 12])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_what_the_truth_masks_with_an_infinity_must_be_masked_and_the_rest_is_measured(
    dtype: str, elements: int
) -> None:
    logits = drawn(elements, seed=3)
    truth = logits.masked_fill(torch.arange(elements) % 3 == 0, -math.inf)
    control = truth * (1 + epsilon(dtype))
    assert measure("x", truth.clone(), truth, dtype=dtype, controls=[control]).decidable
    for wrong in (logits, truth.abs(), truth * 1.5, truth.nan_to_num(), truth.roll(1), truth + math.nan):
        assert not right(wrong, truth, dtype, control)
    everywhere = torch.full_like(truth, -math.inf)
    assert right(everywhere.clone(), everywhere, dtype)
    assert not right(torch.zeros_like(truth), everywhere, dtype)
    assert not right(everywhere, torch.zeros_like(truth), dtype)


def test_zeros_integers_and_booleans_are_exact() -> None:
    zeros, truth = torch.zeros(3, 4, dtype=torch.float64), torch.arange(6)
    assert right(zeros, zeros) and right(-zeros, zeros)
    tiny = zeros.clone()
    tiny[1, 1] = 1e-300
    assert not right(tiny, zeros)
    assert right(truth.clone(), truth) and not right(truth + torch.tensor([0, 0, 0, 0, 0, 1]), truth)
    assert not right(torch.tensor([True, False]), torch.tensor([True, True]))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_beside_a_truth_of_zeros_it_is_told_what_was_found(dtype: str) -> None:
    zeros = torch.zeros(3, 4, dtype=torch.float64)
    found = measure("aux/0", zeros + 0.25, zeros, dtype=dtype)
    assert (found.measure, found.error, found.allowed, found.wrong) == (ABSOLUTE, 0.25, 0.0, True)
    rounded = measure("aux/0", zeros + 5e-9, zeros, dtype=dtype, controls=[zeros + 1e-9, zeros])
    assert rounded.allowed == pytest.approx(6e-9) and rounded.right
    assert not measure("aux/0", zeros + 7e-9, zeros, dtype=dtype, controls=[zeros + 1e-9]).right
    lost = measure("aux/0", zeros + math.nan, zeros, dtype=dtype)
    assert (lost.error, lost.wrong) == (math.inf, True)
    assert measure("aux/0", zeros, zeros, dtype=dtype).right


def test_a_truth_that_is_zero_but_for_rounding_is_scaled_by_its_kind() -> None:
    truth = {"grad/q.bias": drawn(64, seed=1), "grad/k.bias": drawn(64, seed=2) * 1e-17, "loss/0": torch.tensor(7.0)}
    kind = kind_rms(truth)["grad"]
    assert kind == pytest.approx(float(truth["grad/q.bias"].square().mean().div(2).sqrt()))
    assert least_rms(TruthTensor.of(truth["grad/k.bias"]), kind) == kind
    other_rounding = drawn(64, seed=3) * 1e-17
    assert measure("k", other_rounding, truth["grad/k.bias"], dtype="float64", kind=kind).right
    assert not measure("k", other_rounding, truth["grad/k.bias"], dtype="float64").right
    wrong = drawn(64, seed=3) * 1e-8
    assert not measure("k", wrong, truth["grad/k.bias"], dtype="float64", kind=kind).right
    bf16_rounding = drawn(64, seed=3) * 0.5 * epsilon("bfloat16") * kind
    assert measure("k", bf16_rounding, truth["grad/k.bias"], dtype="bfloat16", kind=kind).right
    small, large = drawn(8, 8, seed=1) * 1e-6, drawn(100, 100, seed=2)
    kind = kind_rms({"grad/a": small, "grad/b": large})["grad"]
    assert not measure("a", small * 1.001, small, dtype="float64", kind=kind).right, "the large one hides nothing"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_low_precision_sums_in_another_order_pass_and_a_lost_rank_fails(dtype: str) -> None:
    kind = getattr(torch, dtype)
    x, w = drawn(64, 512, seed=1).to(kind), drawn(512, 96, seed=2).to(kind)
    truth = x.double() @ w.double()

    def summed(order: list[int]) -> Tensor:
        total = x.chunk(4, 1)[order[0]] @ w.chunk(4)[order[0]]
        for part in order[1:]:
            total = total + x.chunk(4, 1)[part] @ w.chunk(4)[part]
        return total

    control = summed([3, 2, 1, 0])
    honest = measure("y", summed([0, 1, 2, 3]), truth, dtype=dtype, controls=[control])
    assert honest.right and honest.decidable
    assert honest.epsilons == honest.error / epsilon(dtype)
    assert not measure("y", summed([0, 1, 2]), truth, dtype=dtype, controls=[control]).right
    one_row = summed([0, 1, 2, 3])
    one_row[17] = one_row[18]
    assert not measure("y", one_row, truth, dtype=dtype, controls=[control]).right


def test_an_element_that_stands_out_may_be_off_by_epsilons_of_its_own_size() -> None:
    """Found by `bench.clean`: gradients of 1038 logits, of which the target's is 32 times the rms of all."""
    truth = torch.full((4, 1024), 1e-3, dtype=torch.float64)
    truth[:, 17] = -1.0
    own, rms = torch.zeros_like(truth), float(truth.square().mean().sqrt())
    own[2, 17] = epsilon("float32")
    assert 3.9 * own.max() / rms > 100 * epsilon("float32"), "beyond the floor of the peak"
    assert measure("g", truth + 3.9 * own, truth, dtype="float32", controls=[truth]).right
    beyond = measure("g", truth + 4.1 * own, truth, dtype="float32", controls=[truth])
    assert (beyond.measure, beyond.right) == ("peak", False)
    assert not measure("g", truth + 2 * own.roll(1), truth, dtype="float32", controls=[truth]).right, "a small element"
    assert not measure("g", truth + own / 10, truth, dtype="float64").right


def test_where_rounding_explains_everything_nothing_is_proved_and_a_lucky_control_run_leaves_the_floor() -> None:
    truth = drawn(50, seed=1)
    lucky = measure("x", truth.float(), truth, dtype="float32", controls=[truth])
    assert lucky.right and lucky.allowed in (4 * epsilon("float32"), 32 * epsilon("float32"))
    hopeless = truth + drawn(50, seed=2)
    found = measure("x", hopeless, truth, dtype="bfloat16", controls=[hopeless])
    assert found.right and not found.decidable and found.allowed > 0.5
    assert not measure("x", truth * 100, truth, dtype="bfloat16", controls=[hopeless]).right
    found = measure("x", truth.float(), truth, dtype="float32", controls=[torch.full((50,), math.nan)])
    assert not (found.right and found.decidable), "nor by a control run that is not finite"


def test_the_two_measures_see_different_errors() -> None:
    truth = drawn(1000, 10, seed=1)
    local = truth.clone()
    local[3, 3] += 1
    far = distance(local, truth)
    assert far.peak > 100 * far.frobenius * 0.5
    diffuse = distance(truth * (1 + 1e-6), truth)
    assert diffuse.frobenius == pytest.approx(1e-6, rel=1e-6)
    assert distance(torch.empty(0), torch.empty(0)).peak == 0
    for magnitude in (1e-300, 1e-150, 1e150, 1e300):  # they neither vanish nor overflow
        large = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64) * magnitude
        assert distance(large * 2, large).frobenius == pytest.approx(1.0)


def test_what_a_kink_may_change_is_added_to_the_limit_of_the_control_run_as_it_is() -> None:
    truth = torch.ones(100, dtype=torch.float64)
    kink = torch.zeros_like(truth)
    kink[7] = 0.5

    def measured(value: Tensor, *flips: Tensor) -> Measured:
        return measure("grad/x", value, truth, dtype="bfloat16", controls=[truth * (1 + 2**-10)], relu_flips=flips)

    plain, moved = measured(truth + 0.9 * kink), measured(truth + 0.9 * kink, kink, 0 * kink)
    assert not plain.right and moved.right and moved.decidable
    floor = 32 * 2**-7
    assert (plain.allowed, moved.allowed) == pytest.approx((floor, floor + 0.5))
    assert not measured(truth + 2 * kink, kink).right
    assert not measured(truth + 0.4, kink).right  # a diffuse error is no kink


@given(seeds, st.integers(200, 400))
def test_what_storing_rounds_is_allowed_once(seed: int, elements: int) -> None:
    truth = drawn(elements, seed=seed)
    truth /= truth.square().mean().sqrt()
    stored = torch.full_like(truth, 0.1)
    rounded = truth + (torch.rand(elements, generator=torch.Generator().manual_seed(seed)) - 0.5).double() * 0.2

    def right(value: Tensor, control: Tensor) -> bool:
        found = measure("param/x", value, truth, dtype="float32", controls=[control], stored=stored)
        assert found.loose == (0 if control is rounded else elements), "no element is off by more than is allowed"
        return found.right

    assert right(rounded, truth) and right(rounded, rounded), "whether the control run is lucky or not"
    signs = drawn(elements, seed=seed + 1).sign()
    assert not right(truth + 0.4 * signs, rounded), "not six times the control run's error and storing besides"


def test_the_squares_of_a_small_gradient_are_no_zeros_beside_those_of_others() -> None:
    large, small = (f"exp_avg_sq_after/0/layers.0.mlp.w1.{part}" for part in ("weight", "bias"))
    truth = {large: drawn(8, 6).square(), small: 1e-7 * drawn(8, seed=8).square()}
    wrong = planted({**truth, small: truth[small] * (1 + 1e-6)}, truth=truth)
    size = sizes_of(wrong.run, wrong.truth)["exp_avg_sq_after"]
    assert compare_with_truth(wrong.run, wrong.truth, small, size).wrong
    assert compare_with_truth(wrong.run, wrong.truth, large, size).right


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_huge_numbers_have_a_size_and_the_largest_of_a_dtype_is_a_mask(dtype: str) -> None:
    huge = drawn(40, seed=1) * 1e300
    assert kind_rms({"mine/x": huge})["mine"] == pytest.approx(1e300, rel=0.5)
    for wrong in (huge * 2, huge * 1.1, huge.roll(1)):
        assert not measure("mine/x", wrong, huge, dtype=dtype, kind=kind_rms({"mine/x": huge})["mine"]).right
    logits = drawn(40, seed=2)
    masked = logits.masked_fill(logits > 1, torch.finfo(torch.float64).min)
    kind = kind_rms({"logits/0": masked, "logits/1": logits})["logits"]
    assert kind == pytest.approx(kind_rms({"logits/1": logits})["logits"]), "a mask has no size"
    narrow = logits.masked_fill(logits > 1, torch.finfo(torch.float32).min)
    both = masked.masked_fill(logits < -1, -torch.inf)
    assert measure("logits/0", both, both, dtype=dtype, kind=kind).decidable
    assert not measure("logits/0", both + 0.1 * (logits.abs() < 1), both, dtype=dtype, kind=kind).right
    assert all(measure("logits/0", value, masked, dtype=dtype, kind=kind).decidable for value in (masked, narrow))
    for wrong in (
        masked * 1.5,
        masked + 0.1 * (logits < 0),
        logits,
        masked.roll(1),
        logits.masked_fill(logits > 1, 9.0),
    ):
        assert not measure("logits/0", wrong, masked, dtype=dtype, kind=kind).right
