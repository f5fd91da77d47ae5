"""Batches that tests draw themselves, so that they know every sentence; the numbers come from a seed.

Tokens int64 in [0, vocab), labels with some -100, a mask of zeros and ones with the first token always counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from reference.case import Case
from reference.data.batches import Batch


def rows(case: Case, seed: int) -> Batch:
    """An unpacked micro-batch [batch, seq]."""
    return _drawn(case, case.batch, case.seq, seed, None)


def sentences(case: Case, lengths: Sequence[int], seed: int) -> Batch:
    """One packed row that holds sentences of these lengths."""
    return _drawn(case, 1, sum(lengths), seed, torch.tensor([0, *accumulate(lengths)]))


def alone(batch: Batch, start: int, end: int) -> Batch:
    """The tokens start..end of a packed row as a row of their own, positions from 0."""
    cut = slice(start, end)
    return Batch(
        tokens=batch.tokens[:, cut],
        labels=batch.labels[:, cut],
        positions=torch.arange(end - start)[None],
        loss_mask=batch.loss_mask[:, cut],
        cu_seqlens=None,
        max_seqlen=end - start,
    )


def joined(batches: Sequence[Batch]) -> Batch:
    """Unpacked micro-batches as one."""
    names = ("tokens", "labels", "positions", "loss_mask")
    parts: dict[str, Any] = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
    return Batch(**parts, cu_seqlens=None, max_seqlen=batches[0].max_seqlen)


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
        max_seqlen=length if cu_seqlens is None else int(cu_seqlens.diff().max()),
    )
