"""The loss of the reference: torch's cross entropy, Megatron's label smoothing, masks and ignored labels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from reference.model import loss

SHAPE = (2, 5)


def drawn(vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels with some -100, and a mask with a counted first token."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*SHAPE, vocab, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab, SHAPE, generator=generator)
    labels[torch.rand(SHAPE, generator=generator) < 0.3] = -100
    mask = (torch.rand(SHAPE, generator=generator) < 0.6).float()
    labels[0, 0], mask[0, 0] = vocab - 1, 1.0
    return logits.requires_grad_(), labels, mask


@settings(max_examples=30, deadline=None)
@given(vocab=st.integers(2, 40), torch_smoothing=st.floats(0, 1), seed=st.integers(0, 1000))
def test_mean_loss_and_gradient_equal_torch_after_conversion_of_the_smoothing(
    vocab: int, torch_smoothing: float, seed: int
) -> None:
    # torch spreads its share over all V classes, the target included; Megatron over the other V - 1
    logits, labels, mask = drawn(vocab, seed)
    summed, tokens = loss.summed(logits, labels, mask, torch_smoothing * (vocab - 1) / vocab)
    right = functional.cross_entropy(
        logits.flatten(0, 1), labels.where(mask > 0, -100).flatten(), label_smoothing=torch_smoothing, reduction="sum"
    )
    torch.testing.assert_close(summed, right, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(summed, logits)
    (right_gradient,) = torch.autograd.grad(right, logits)
    torch.testing.assert_close(gradient, right_gradient, rtol=1e-12, atol=1e-12)
    assert tokens == ((labels != -100) & (mask > 0)).sum()


def test_smoothed_loss_of_one_token_is_megatrons_formula() -> None:
    probability = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    found = loss.cross_entropy(probability.log()[None, None], torch.tensor([[1]]), 0.3)
    right = -(0.7 * probability[1].log() + 0.15 * probability[0].log() + 0.15 * probability[2].log())
    torch.testing.assert_close(found[0, 0], right)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), smoothing=st.sampled_from((0.0, 0.2)))
def test_tokens_that_do_not_count_change_neither_loss_nor_gradient(seed: int, smoothing: float) -> None:
    logits, labels, mask = drawn(9, seed)
    summed, tokens = loss.summed(logits, labels, mask, smoothing)
    uncounted = (labels == -100) | (mask == 0)
    other_logits = torch.where(uncounted[..., None], logits.detach().flip(-1) + 1, logits.detach()).requires_grad_()
    other_labels = torch.where((mask == 0) & (labels != -100), (labels + 1) % 9, labels)
    other_summed, other_tokens = loss.summed(other_logits, other_labels, mask, smoothing)
    assert torch.equal(summed, other_summed) and torch.equal(tokens, other_tokens)
    (gradient,) = torch.autograd.grad(summed, logits)
    assert not gradient[uncounted].any()
    assert gradient[~uncounted].abs().sum(-1).min() > 0


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_of_a_token_is_0_exactly_where_its_label_is_ignored(smoothing: float) -> None:
    logits, labels, _ = drawn(9, seed=3)
    found = loss.cross_entropy(logits, labels, smoothing)
    assert torch.equal(found == 0, labels == -100) and (labels == -100).any()


@pytest.mark.parametrize("weight", [0.25, 2.0])
def test_loss_mask_is_a_weight_not_only_a_switch(weight: float) -> None:
    logits, labels, mask = drawn(9, seed=4)
    summed, tokens = loss.summed(logits, labels, mask)
    scaled, scaled_tokens = loss.summed(logits, labels, weight * mask)
    torch.testing.assert_close(scaled, weight * summed)
    torch.testing.assert_close(scaled_tokens, weight * tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_of_low_precision_logits_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits, labels, mask = drawn(40, seed=2)
    rounded = logits.detach().to(dtype)
    summed, tokens = loss.summed(rounded, labels, mask, 0.1)
    right, _ = loss.summed(rounded.double(), labels, mask, 0.1)
    assert summed.dtype == tokens.dtype == torch.float32
    torch.testing.assert_close(summed.double(), right, rtol=1e-6, atol=0)


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[[60000.0, -60000.0, 0.0]]], dtype=torch.float16)
    found = loss.cross_entropy(logits, torch.tensor([[1]]), 0.1)
    assert found.item() == pytest.approx(0.9 * 119_990 + 0.05 * 59_995, rel=1e-3)
