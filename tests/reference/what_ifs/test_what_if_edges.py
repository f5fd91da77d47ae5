"""What-ifs of ranges that are one row off, held against parts that look their own rows up, one by one; of context
slices, with places and labels that are written out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from reference.case import Case
from reference.data.batches import micro_batch
from reference.data.packing import IGNORED
from reference.model.parameters import full, weights
from reference.training import subject as dense
from reference.what_ifs import slices
from reference.what_ifs.edges import edges

CPU = torch.device("cpu")
PARTS = 2
CASE = Case.parse(
    f"mode=tp tp={PARTS} layers=1 hidden=16 heads=4 ffn=12 vocab=264 seq=16 batch=4 micro=1 steps=1 label_smoothing=0.1"
)
READINGS: dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "without_last": (lambda place, size: (place >= 0) & (place < size - 1), lambda place, size: place),
    "without_first": (lambda place, size: (place > 0) & (place < size), lambda place, size: place),
    "and_after": (lambda place, size: (place >= 0) & (place <= size), lambda place, size: place.clamp(max=size - 1)),
    "and_before": (lambda place, size: (place >= -1) & (place < size), lambda place, size: place.clamp(min=0)),
}
"""Reading -> which places a part takes for its own, and the row that it reads for each."""


@pytest.fixture(scope="module")
def found() -> dict[str, Tensor]:
    return edges(CASE, {name: tensor.double() for name, tensor in weights(CASE, CPU).items()}, CPU)


@pytest.mark.parametrize("reading", READINGS)
def test_rows_of_a_table(found: dict[str, Tensor], reading: str) -> None:
    own, row = READINGS[reading]
    batch, table = micro_batch(CASE, 0, 0, 0), full(CASE, "embedding.tokens.weight").double()
    table = torch.cat([table, torch.zeros(CASE.padded_vocab - CASE.vocab, CASE.hidden, dtype=torch.float64)])
    size = len(table) // PARTS
    total = full(CASE, "embedding.positions.weight").double()[batch.positions]
    for part in range(PARTS):
        place = batch.tokens - part * size
        rows = table[part * size :][:size][row(place, size).clamp(0, size - 1)]
        total = total + rows * own(place, size)[..., None]
    torch.testing.assert_close(found[f"edge_off.rows_{reading}_{PARTS}/act/embedding"], total)
    assert not torch.equal(total, dense.true_activations(CASE, CPU)["act/embedding"])  # the data meet both edges


@pytest.mark.parametrize("reading", READINGS)
def test_labels(found: dict[str, Tensor], reading: str) -> None:
    own, row = READINGS[reading]
    batch, logits = micro_batch(CASE, 0, 0, 0), dense.truth(CASE, CPU)["logits/0"]
    counts, columns = batch.loss_mask.double() * (batch.labels >= 0), CASE.padded_vocab // PARTS
    x, hit = logits - logits.amax(-1, keepdim=True), torch.zeros_like(batch.labels, dtype=torch.float64)
    for part in range(PARTS):
        size = min(columns, CASE.vocab - part * columns)
        place = batch.labels - part * columns
        mine = x[..., part * columns :][..., :size].gather(-1, row(place, size).clamp(0, size - 1)[..., None])[..., 0]
        hit += mine * (own(place, size) & (batch.labels >= 0))
    spread = 0.1 / (CASE.vocab - 1)
    loss = x.exp().sum(-1).log() - (1 - 0.1 - spread) * hit - spread * x.sum(-1)
    torch.testing.assert_close(found[f"edge_off.labels_{reading}_{PARTS}/loss/0"], (loss * counts).sum() / counts.sum())


def test_the_last_token_taken_for_padding() -> None:
    case = CASE.but(label_smoothing=0.0)
    batch, logits = micro_batch(case, 0, 0, 0), dense.truth(case, CPU)["logits/0"][..., :-1]
    counts, others = (
        batch.loss_mask.double() * (batch.labels >= 0),
        (batch.labels >= 0) & (batch.labels < case.vocab - 1),
    )
    x = logits - logits.amax(-1, keepdim=True)
    hit = x.gather(-1, batch.labels.where(others, 0)[..., None])[..., 0] * others
    loss = ((x.exp().sum(-1).log() - hit) * counts).sum() / counts.sum()
    exact = {name: tensor.double() for name, tensor in weights(case, CPU).items()}
    torch.testing.assert_close(edges(case, exact, CPU)["edge_off.last_token_out_2/loss/0"], loss)


SLICED = "mode=tp tp=1 heads=2 kv_heads=1 hidden=8 layers=1 seq=8 cp=2 batch=2"
ZIGZAG = [[0, 1, 6, 7], [2, 3, 4, 5]]
"""What the two ranks hold of eight tokens."""


def seen(case: Case, reading: str) -> Tensor:
    """Which key [of 8] each query [of 8] sees: values are unit vectors, so that the context is the shares."""
    zeros, unit = torch.zeros(1, 8, 1, 8), torch.eye(8)[None, :, None]
    attention = slices.masks(case)[f"slice_places.{reading}"]
    shares: Tensor = attention(zeros, zeros, unit, torch.ones(8, 8, dtype=torch.bool).tril())[0]
    return shares > 0


def test_masks_at_other_places() -> None:
    case = Case.parse(SLICED)
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
    case = Case.parse(f"{SLICED} {words}")
    feed = slices.other_positions(case)[f"slice_places.positions_{reading}"]
    assert feed(case, 0, 0, 0, device=CPU).positions.tolist() == [places] * 2


def test_labels_shifted_in_a_slice() -> None:
    """Token 1 gets token 6, its neighbour in the slice, and tokens 7 and 5, the last ones, what the reading says."""
    case = Case.parse(SLICED)
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
