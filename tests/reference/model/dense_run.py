"""Small dense models of every family, batches whose sentences are known, and one forward and backward of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.case.case import FAMILIES
from shardproof.reference.data.batches import Batch
from shardproof.reference.model import decoder
from shardproof.reference.model import losses as loss
from shardproof.reference.model.parameters import weights

CPU = torch.device("cpu")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseRun:
    """Logits [B, S, vocab], the mean loss over counted tokens, and its gradient in each parameter."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def dense_run(case: Case, batch: Batch, values: dict[str, Tensor] | None = None) -> DenseRun:
    """Run the case's weights, or these instead, on one batch."""
    leaves = {name: value.clone().requires_grad_() for name, value in (values or weights(case, CPU)).items()}
    logits = decoder.logits(case, leaves, batch)
    summed, tokens = loss.summed_loss(logits, batch.labels, batch.loss_mask, case.label_smoothing)
    mean = summed / tokens
    mean.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return DenseRun(logits=logits.detach(), loss=mean.detach(), gradients=gradients)


def ignored_labels(batch: Batch) -> Tensor:
    """The batch's labels with every token that does not count set to -100."""
    return batch.labels.where(batch.loss_mask > 0, -100)


def largest_difference(found: Tensor, right: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest element of the right one."""
    assert found.shape == right.shape, (found.shape, right.shape)
    return float((found - right.detach()).abs().max() / right.detach().abs().max())


def rows(case: Case, seed: int) -> Batch:
    """An unpacked micro-batch [batch, seq]."""
    return _drawn(case, case.batch, case.seq, seed, None)


def sentences(case: Case, lengths: Sequence[int], seed: int) -> Batch:
    """A packed row that holds sentences of these lengths."""
    return _drawn(case, 1, sum(lengths), seed, torch.tensor([0, *accumulate(lengths)]))


def _drawn(case: Case, batch: int, length: int, seed: int, cu_seqlens: torch.Tensor | None) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length)
    labels = torch.randint(case.vocab, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.2] = -100
    labels[:, 0] = 0
    loss_mask = (torch.rand(shape, generator=generator) < 0.8).float()
    loss_mask[:, 0] = 1
    positions = torch.arange(length).expand(batch, -1)
    if cu_seqlens is not None:
        positions = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])[None]
    return Batch(
        tokens=torch.randint(case.vocab, shape, generator=generator),
        labels=labels,
        positions=positions,
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
    )


@st.composite
def models(draw: st.DrawFn, /, **fixed: Any) -> Case:
    """A small model on one rank; `fixed` words override what would be drawn."""
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from((4, 6)))
    family = draw(st.sampled_from(tuple(FAMILIES)))
    words: dict[str, Any] = {
        "mode": "mtp",
        "tp": 1,
        "family": family,
        "layers": draw(st.integers(1, 2)),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "hidden": kv_heads * group * head_dim,
        "ffn": draw(st.sampled_from((8, 15))),
        "vocab": draw(st.sampled_from((11, 2, 37))),
        "seq": draw(st.integers(2, 7)),
        "batch": draw(st.integers(1, 3)),
        "positions": draw(st.sampled_from(("rope", "learned"))),
        "norm": draw(st.sampled_from(("layernorm", "rmsnorm"))),
        "bias": draw(st.booleans()),
        "tied": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "fuse_qkv": draw(st.booleans()),
        "label_smoothing": draw(st.sampled_from((0.0, 0.1))),
        "seed": draw(st.integers(0, 2**31 - 1)),
    } | fixed
    if words.setdefault("activation", FAMILIES[family]["activation"]) == "swiglu":
        words.setdefault("fuse_mlp", draw(st.booleans()))
    return Case.of(**words)
