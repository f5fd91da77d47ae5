"""What-ifs of ranges that are one row off, held against parts that look their own rows up, one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from reference.case import Case
from reference.data.batches import micro_batch
from reference.model.parameters import full, weights
from reference.training import subject as dense
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
