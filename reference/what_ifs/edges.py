"""What-ifs of a split vocabulary whose ranges are one row off: in the lookup of tokens, and in that of labels.

A reading ends in the number of parts. In every part the first or the last row is left out. Or the row beside its range
counts in it too, as the nearest one that it has. Letters: B rows, S tokens, H hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import Batch
from shardproof.reference.losses import cross_entropy as loss
from shardproof.reference.what_ifs.tables import parts_of, with_positions
from shardproof.reference.what_ifs.what_if import Dense, WhatIf

_Rows = Callable[[Tensor], Tensor]
"""Ids [B, S] -> what is read for them, [B, S, ...]; 0 for ids below 0."""


_Readings = Iterator[tuple[str, Mapping[str, Tensor]]]


def _edges(dense: Dense) -> _Readings:
    """The embedding's output and the loss of the first step when ranges are one row off."""
    case = dense.case
    for parts in parts_of(case):
        if case.padded_vocab % parts == 0:
            every = [(part + 1) * case.padded_vocab // parts for part in range(parts)]
            ends = [min(end, case.vocab) for end in every]
            for reading, tensors in (*_embeddings(dense, every), *_losses(dense, ends)):
                yield f"{reading}_{parts}", tensors


def _embeddings(dense: Dense, ends: list[int]) -> _Readings:
    table = dense.weights["embedding.tokens.weight"]

    def rows(ids: Tensor) -> Tensor:
        return table[ids.clamp(min=0)] * (ids >= 0)[..., None]

    for reading, lookup in _LOOKUPS.items() if dense.case.embedding == "vocab" else ():
        yield f"rows_{reading}", with_positions(dense, partial(lookup, rows=rows, ends=ends))


def _losses(dense: Dense, ends: list[int]) -> _Readings:
    case, steps = dense.case, list(zip(dense.batches, dense.logits, strict=True))
    tokens = torch.stack([loss.counted(batch.labels, batch.loss_mask).sum() for batch in dense.batches]).sum()
    for reading, lookup in _LOOKUPS.items():
        sums = [_summed(case, batch, x, lookup, ends) for batch, x in steps]
        yield f"labels_{reading}", {"loss/0": torch.stack(sums).sum() / tokens}
    sums = [_without_last(case, batch, x) for batch, x in steps]
    yield "last_token_out", {"loss/0": torch.stack(sums).sum() / tokens}


class _Lookup(Protocol):
    def __call__(self, ids: Tensor, /, rows: _Rows, ends: list[int]) -> Tensor: ...


def _inner(ends: list[int]) -> list[int]:
    """Where a part ends and another begins; the last ones may hold nothing but padding."""
    return [end for end in ends if end < ends[-1]]


def _without(ids: Tensor, rows: _Rows, places: list[int]) -> Tensor:
    return rows(torch.where(torch.isin(ids, torch.tensor(places, device=ids.device)), -1, ids))


def _with(ids: Tensor, rows: _Rows, pairs: list[tuple[int, int]]) -> Tensor:
    """Ids that are the first of a pair read the second one too."""
    beside = torch.full_like(ids, -1)
    for place, other in pairs:
        beside = torch.where(ids == place, other, beside)
    return rows(ids) + rows(beside)


_LOOKUPS: dict[str, _Lookup] = {
    "without_first": lambda ids, rows, ends: _without(ids, rows, [0, *ends[:-1]]),
    "without_last": lambda ids, rows, ends: _without(ids, rows, [end - 1 for end in ends]),
    "and_after": lambda ids, rows, ends: _with(ids, rows, [(end, end - 1) for end in _inner(ends)]),
    "and_before": lambda ids, rows, ends: _with(ids, rows, [(end - 1, end) for end in _inner(ends)]),
}
"""How ids are read whose parts end (and begin) at these rows."""


def _summed(case: Case, batch: Batch, x_BSV: Tensor, lookup: _Lookup, ends: list[int]) -> Tensor:
    """The summed loss of a micro-batch whose labels are looked up so, from logits less their maximum."""
    x_BSV = x_BSV - x_BSV.amax(-1, keepdim=True)

    def read(ids: Tensor) -> Tensor:
        return x_BSV.gather(-1, ids.clamp(min=0)[..., None])[..., 0] * (ids >= 0)

    return _loss(case, batch, x_BSV, lookup(batch.labels, read, ends))


def _without_last(case: Case, batch: Batch, x_BSV: Tensor) -> Tensor:
    """The summed loss when the last token of the vocabulary is taken for padding."""
    x_BSV = x_BSV[..., :-1] - x_BSV[..., :-1].amax(-1, keepdim=True)
    known = (batch.labels >= 0) & (batch.labels < case.vocab - 1)
    hit = x_BSV.gather(-1, batch.labels.where(known, 0)[..., None])[..., 0] * known
    return _loss(case, batch, x_BSV, hit)


def _loss(case: Case, batch: Batch, x_BSV: Tensor, hit_BS: Tensor) -> Tensor:
    spread = case.label_smoothing / (case.vocab - 1)
    every = x_BSV.exp().sum(-1).log() - (1 - case.label_smoothing - spread) * hit_BS - spread * x_BSV.sum(-1)
    return (every * loss.counted(batch.labels, batch.loss_mask)).sum()


WHAT_IFS = (WhatIf("edge_off", "when ranges of the vocabulary's parts are one row off", _edges, names_readings=True),)
