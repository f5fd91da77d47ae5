"""What-ifs of context slices: the dense model with places and labels that are written out here by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reference.case import Case
from reference.data.batches import micro_batch
from reference.data.packing import IGNORED
from reference.what_ifs import slices

SIZES = "mode=tp tp=1 heads=2 kv_heads=1 hidden=8 layers=1 seq=8 cp=2 batch=2"
CPU = torch.device("cpu")
ZIGZAG = [[0, 1, 6, 7], [2, 3, 4, 5]]
"""What the two ranks hold of eight tokens."""


def seen(case: Case, reading: str) -> Tensor:
    """Which key [of 8] each query [of 8] sees: values are unit vectors, so that the context is the shares."""
    zeros, unit = torch.zeros(1, 8, 1, 8), torch.eye(8)[None, :, None]
    attention = slices.masks(case)[f"slice_places.{reading}"]
    shares: Tensor = attention(zeros, zeros, unit, torch.ones(8, 8, dtype=torch.bool).tril())[0]
    return shares > 0


def test_masks_at_other_places() -> None:
    case = Case.parse(SIZES)
    own = {place: index for rank in ZIGZAG for index, place in enumerate(rank)}
    gathered = {place: index for index, place in enumerate(sum(ZIGZAG, []))}
    row = {place: place for place in range(8)}
    for reading, queries, keys in (
        ("mask_by_places_in_the_slice", own, own),
        ("mask_in_the_order_of_the_ranks", gathered, gathered),
        ("keys_in_the_order_of_the_ranks", row, gathered),
        ("queries_by_places_in_the_slice", own, row),
    ):
        by_hand = torch.tensor([[queries[q] >= keys[k] for k in range(8)] for q in range(8)])
        assert torch.equal(seen(case, reading), by_hand), reading


@pytest.mark.parametrize(
    ("words", "reading", "places"),
    [
        ("", "in_the_slice", [0, 1, 0, 1, 2, 3, 2, 3]),
        ("", "in_the_order_of_the_ranks", [0, 1, 4, 5, 6, 7, 2, 3]),
        ("cp_slices=contiguous", "of_zigzag_slices", [0, 1, 6, 7, 2, 3, 4, 5]),
    ],
)
def test_positions_of_other_places(words: str, reading: str, places: list[int]) -> None:
    case = Case.parse(f"{SIZES} {words}")
    feed = slices.other_positions(case)[f"slice_places.positions_{reading}"]
    assert feed(case, 0, 0, 0, device=CPU).positions.tolist() == [places] * 2


def test_labels_shifted_in_a_slice() -> None:
    """Token 1 gets token 6, its neighbour in the slice, and tokens 7 and 5, the last ones, what the reading says."""
    case = Case.parse(SIZES)
    batch = micro_batch(case, 0, 0, 0)
    following = {0: 1, 1: 6, 6: 7, 2: 3, 3: 4, 4: 5}
    for reading, last in (
        ("kept", {7: batch.labels[:, 7], 5: batch.labels[:, 5]}),
        ("without_one", {7: torch.tensor([IGNORED] * 2), 5: torch.tensor([IGNORED] * 2)}),
        ("the_first_token", {7: batch.tokens[:, 0], 5: batch.tokens[:, 2]}),
    ):
        found = slices.other_labels(case)[f"slice_labels.last_{reading}"](case, 0, 0, 0, device=CPU).labels
        by_hand = torch.stack([last[p] if p in last else batch.tokens[:, following[p]] for p in range(8)], 1)
        assert torch.equal(found, by_hand.where(batch.labels != IGNORED, batch.labels))


def test_no_slices_no_what_if() -> None:
    case = Case.parse("mode=tp tp=2")
    assert not slices.masks(case) | slices.other_positions(case) | slices.other_labels(case)
