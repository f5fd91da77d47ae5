"""Layers, loss and Adam's slack of the reference against torch's own and against their defining properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from shardproof.reference.case import Case
from shardproof.reference.model import layers
from shardproof.reference.model import losses as loss
from shardproof.reference.model.parameters import shapes
from shardproof.reference.training.adam import EPS, bound_adam, rounding_slack
from tests.reference.model.dense_run import noise

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rounds_once_at_its_end(dtype: torch.dtype) -> None:
    x, weight, bias = (noise(*shape, seed=3).to(dtype) for shape in ((4, 64), (64,), (64,)))
    found = layers.norm(x, weight, bias)
    right = layers.norm(x.double(), weight.double(), bias.double())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_scores_are_scaled_and_normalised_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (8 * noise(1, 5, 1, 6, seed=seed).to(dtype) for seed in range(3))
    found = layers.attention(q, k, v, layers.visible(5, None, torch.device("cpu")))
    scores = (q[0, :, 0] @ k[0, :, 0].T).float() / math.sqrt(6)
    shares = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(-1)
    right = shares.to(dtype) @ v[0, :, 0]
    if dtype == torch.float32:  # a batched product may add in another order; the 16-bit types round that away
        torch.testing.assert_close(found[0], right, rtol=0, atol=8 * torch.finfo(dtype).eps * float(v.abs().max()))
    else:
        assert torch.equal(found[0], right)


def drawn(vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels with some -100, and a mask with a counted first token."""
    shape = (2, 5)
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*shape, vocab, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = -100
    mask = (torch.rand(shape, generator=generator) < 0.6).float()
    labels[0, 0], mask[0, 0] = vocab - 1, 1.0
    return logits.requires_grad_(), labels, mask


@settings(max_examples=30, deadline=None)
@given(vocab=st.integers(2, 40), torch_smoothing=st.floats(0, 1), seed=st.integers(0, 1000))
def test_mean_loss_and_gradient_equal_torch_after_conversion_of_the_smoothing(
    vocab: int, torch_smoothing: float, seed: int
) -> None:
    # torch spreads its share over all V classes, the target included; Megatron over the other V - 1
    logits, labels, mask = drawn(vocab, seed)
    summed, tokens = loss.summed_loss(logits, labels, mask, torch_smoothing * (vocab - 1) / vocab)
    right = functional.cross_entropy(
        logits.flatten(0, 1), labels.where(mask > 0, -100).flatten(), label_smoothing=torch_smoothing, reduction="sum"
    )
    torch.testing.assert_close(summed, right, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(summed, logits)
    (right_gradient,) = torch.autograd.grad(right, logits)
    torch.testing.assert_close(gradient, right_gradient, rtol=1e-12, atol=1e-12)
    assert tokens == ((labels != -100) & (mask > 0)).sum()


def test_loss_mask_is_a_weight_not_only_a_switch() -> None:
    logits, labels, mask = drawn(9, seed=4)
    summed, tokens = loss.summed_loss(logits, labels, mask)
    scaled, scaled_tokens = loss.summed_loss(logits, labels, 0.25 * mask)
    torch.testing.assert_close(scaled, 0.25 * summed)
    torch.testing.assert_close(scaled_tokens, 0.25 * tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_of_low_precision_logits_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits, labels, mask = drawn(40, seed=2)
    rounded = logits.detach().to(dtype)
    summed, tokens = loss.summed_loss(rounded, labels, mask, 0.1)
    right, _ = loss.summed_loss(rounded.double(), labels, mask, 0.1)
    assert summed.dtype == tokens.dtype == torch.float32
    torch.testing.assert_close(summed.double(), right, rtol=1e-6, atol=0)


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[[60000.0, -60000.0, 0.0]]], dtype=torch.float16)
    found = loss.cross_entropy(logits, torch.tensor([[1]]), 0.1)
    assert found.item() == pytest.approx(0.9 * 119_990 + 0.05 * 59_995, rel=1e-3)


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


WORDS = "layers=1 heads=2 hidden=8 ffn=12 vocab=20 seq=4 dtype=float16 master=float32 optimizer=adamw scaler=dynamic"


def test_steps_that_are_skipped_are_none_of_adams() -> None:
    """Two skips, a step, a skip, a step: the range is that of two steps in a row."""
    torch.manual_seed(0)
    first, second, third = ({n: torch.randn(shape) for n, shape in shapes(Case.parse(WORDS)).items()} for _ in range(3))
    found = []
    for taken in ((0, 1), (2, 4)):
        states = {f"exp_avg_after/{step}/{n}": x for step in range(taken[0], taken[1]) for n, x in first.items()}
        states |= {f"exp_avg_sq_after/{step}/{n}": x.abs() for step in range(*taken) for n, x in first.items()}
        truth = states | {f"exp_avg_after/{taken[1]}/{n}": x for n, x in second.items()}
        truth |= {f"skipped/{step}": torch.tensor(int(step not in taken)) for step in range(taken[1] + 1)}
        control = truth | {f"exp_avg_after/{taken[1]}/{n}": x for n, x in third.items()}
        found.append(bound_adam(Case.parse(f"{WORDS} steps={taken[1] + 1}"), states, truth, [control]))
    in_a_row, behind = found
    assert [*behind] == [name.replace("after/0", "after/2") for name in in_a_row] and behind
    assert all(torch.equal(*pair) for pair in zip(in_a_row.values(), behind.values(), strict=True))
