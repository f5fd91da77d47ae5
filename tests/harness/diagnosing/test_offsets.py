"""Flat memory read from another place is told by its offset, on every rank's own blocks; chance is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.diagnosing.rules.offsets import from_offsets
from harness.shard import Shard
from tests.harness.toy_evidence import evidence, outcome_of, truth

W1 = "grad/layers.0.mlp.w1.weight"


def told(change: Tensor | int) -> list[tuple[str, str]]:
    """What is told of two ranks whose shards of a gradient are rolled by this many elements, or all this."""
    ranks = [outcome_of(rank, truth()) for rank in range(2)]
    for outcome in ranks:
        shard = outcome[W1]
        local = shard.local.flatten().roll(change).view_as(shard.local) if isinstance(change, int) else change
        outcome[W1] = Shard(local, shard.offsets, shard.global_shape)
    return [(cause.id, cause.words) for cause in from_offsets(evidence(*ranks), [W1])]


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (1, "its elements stand 1 too late"),
        (-1, "its elements stand 1 too early"),
        (5, "its elements stand 5 too late"),
    ],
)
def test_an_offset_in_flat_memory_is_told(offset: int, words: str) -> None:
    assert told(offset) == [("flat_offset", f"{words} in flat memory: a buffer walked from another place")]


def test_other_numbers_are_no_offset() -> None:
    assert told(0) == told(9) == told(torch.zeros(4, 6)) == []
    assert from_offsets(evidence(), ["param/layers.0.mlp.w1.weight"]) == []
