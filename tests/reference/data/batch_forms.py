"""The three forms of micro-batches that the tests of `reference.data.batches` run through."""

from collections.abc import Iterator

import pytest
import torch

from reference.case import Case
from reference.data.batches import Batch, micro_batch
from reference.data.packing import IGNORED

FORMS = {
    "rows": "dp=3 tp=2 micro=2 steps=2",
    "packed": "preset=tiny-internlm2 dp=3 micro=2 steps=2",
    "sentences": "preset=tiny-internlm2 packed=false dp=3 micro=2 steps=2",
}
every_form = pytest.mark.parametrize("form", FORMS)


def all_batches(case: Case) -> Iterator[tuple[tuple[int, int, int], Batch]]:
    for step in range(case.steps):
        for micro in range(case.micro):
            for dp_rank in range(case.dp):
                yield (step, micro, dp_rank), micro_batch(case, step, micro, dp_rank)


def valid(batch: Batch) -> torch.Tensor:
    return batch.loss_mask * (batch.labels != IGNORED)


def equal(one: Batch, other: Batch) -> bool:
    same = one.max_seqlen == other.max_seqlen
    for name in ("tokens", "labels", "positions", "loss_mask", "cu_seqlens"):
        mine, theirs = getattr(one, name), getattr(other, name)
        same = same and (mine is theirs is None or torch.equal(mine, theirs))
    return same
