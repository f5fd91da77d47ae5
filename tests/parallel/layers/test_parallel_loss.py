"""Vocabulary-parallel cross entropy against torch's own: smoothing, ignored labels, masks, padding, low precision."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from parallel.communication.layout import Cut, Placement, shard
from parallel.communication.mesh import Axis
from parallel.layers.loss import IGNORED, counted, vocabulary_cross_entropy
from tests.parallel.ranks import along_tp, numbers


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
