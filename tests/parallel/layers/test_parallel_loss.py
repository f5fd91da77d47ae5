"""Vocabulary-parallel cross entropy against torch's own: smoothing, ignored labels, masks, padding, low precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from parallel.communication.layout import Cut, Placement, shard
from parallel.communication.mesh import Axis
from parallel.layers.loss import IGNORED, counted, vocabulary_cross_entropy
from tests.parallel.ranks import Calls, along_tp, numbers


def _dense(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Per-token loss by definition: target 1 - a, every other class a / (V - 1); torch does the log-softmax."""
    vocab = logits.shape[-1]
    log = logits.log_softmax(-1)
    target = functional.one_hot(labels.clamp(min=0), vocab).to(log.dtype)
    spread = smoothing / (vocab - 1)
    return -((target * (1 - smoothing) + (1 - target) * spread) * log).sum(-1)


def _case(seed: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Large logits, labels with ignored ones, an uneven loss mask."""
    logits = 20 * numbers(4, 3, vocab, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocab, (4, 3), generator=generator)
    labels[1, 2] = IGNORED
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    return logits, labels, mask


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 4),
    vocab=st.integers(2, 24),
    spare=st.integers(0, 2),
    smoothing=st.sampled_from((0.0, 0.1, 0.9)),
    fused=st.booleans(),
    seed=st.integers(0, 100),
)
def test_loss_and_gradient_are_those_of_the_whole_unpadded_vocabulary(
    ranks: int, vocab: int, spare: int, smoothing: float, fused: bool, seed: int
) -> None:
    logits, labels, mask = _case(seed, vocab)
    padded = (-(-vocab // ranks) + spare) * ranks
    place = Placement(shape=tuple(logits.shape), cuts=(Cut(axis="tp", dim=2, blocks=(padded,)),))

    def program(axis: Axis) -> tuple[Tensor, Tensor]:
        own = shard(logits, place, {"tp": (axis.rank, axis.size)})
        own[..., max(0, vocab - axis.rank * own.shape[-1]) :] = 999.0  # a padded column must not matter
        own.requires_grad_()
        losses = vocabulary_cross_entropy(own, labels, axis, vocab=vocab, smoothing=smoothing, fused=fused)
        (losses * counted(labels, mask)).sum().backward()
        assert own.grad is not None
        return losses.detach(), own.grad

    results = along_tp(ranks, program)
    dense = logits.clone().requires_grad_()
    expected = _dense(dense, labels, smoothing)
    weight = counted(labels, mask)
    (expected * weight).sum().backward()
    for losses, _ in results:
        torch.testing.assert_close(losses * weight, expected.detach() * weight, rtol=1e-11, atol=1e-11)
        assert losses.isfinite().all()
    gradient = torch.cat([gradient for _, gradient in results], -1)
    torch.testing.assert_close(gradient[..., :vocab], dense.grad, rtol=1e-11, atol=1e-11)
    assert torch.equal(gradient[..., vocab:], torch.zeros_like(gradient[..., vocab:]))


def test_without_smoothing_it_is_torchs_cross_entropy() -> None:
    logits, labels, _ = _case(0, 12)

    def program(axis: Axis) -> Tensor:
        own = shard(logits, Placement(shape=(4, 3, 12), cuts=(Cut(axis="tp", dim=2),)), {"tp": (axis.rank, axis.size)})
        return vocabulary_cross_entropy(own, labels, axis, vocab=12)

    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    for losses in along_tp(3, program):
        torch.testing.assert_close(losses.flatten() * (labels.flatten() != IGNORED), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_get_a_float32_loss_and_a_gradient_in_their_dtype(dtype: torch.dtype) -> None:
    logits, labels, _ = _case(1, 9)
    rounded = (logits / 20).to(dtype)

    def program(axis: Axis) -> tuple[Tensor, torch.dtype]:
        own = rounded[..., axis.rank * 3 : axis.rank * 3 + 3].clone().requires_grad_()
        losses = vocabulary_cross_entropy(own, labels, axis, vocab=9)
        losses.sum().backward()
        assert own.grad is not None
        return losses.detach(), own.grad.dtype

    expected = _dense(rounded.float(), labels, 0.0)
    for losses, gradient_dtype in along_tp(3, program):
        assert losses.dtype == torch.float32
        assert gradient_dtype == dtype
        known = labels != IGNORED
        torch.testing.assert_close(losses[known], expected[known], rtol=1e-5, atol=1e-5)


CALLS = {
    (False, 0.0): [("max", 1), ("sum", 1), ("sum", 1)],
    (False, 0.1): [("max", 1), ("sum", 1), ("sum", 1), ("sum", 1)],
    (True, 0.0): [("max", 1), ("sum", 2)],
    (True, 0.1): [("max", 1), ("sum", 3)],
}


@pytest.mark.parametrize(("form", "expected"), CALLS.items())
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 4), (torch.float64, 8)])
def test_the_calls_are_one_maximum_and_the_sums(
    form: tuple[bool, float], expected: list[tuple[str, int]], dtype: torch.dtype, width: int
) -> None:
    calls = Calls()

    def program(axis: Axis) -> None:
        own = numbers(4, 3, 5, dtype=dtype).requires_grad_()
        labels = torch.ones(4, 3, dtype=torch.int64)
        vocabulary_cross_entropy(own, labels, axis, vocab=10, fused=form[0], smoothing=form[1]).sum().backward()

    along_tp(2, program, observer=calls)
    assert [(call.reduce_op, call.payload_bytes) for call in calls.by_rank[1]] == [
        (op, tokens * 12 * width) for op, tokens in expected
    ]
