"""What-ifs of embedding, tied table and loss: each as the split program that has the bug would compute it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from reference.case import Case
from reference.data.batches import micro_batch
from reference.model.parameters import full
from reference.training import subject as dense
from reference.what_ifs.inputs import alternatives

CPU = torch.device("cpu")
SIZES = "layers=1 hidden=8 heads=2 kv_heads=2 ffn=12 seq=8 batch=2 vocab=264 steps=1"


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def table(case: Case) -> Tensor:
    weight = full(case, "embedding.tokens.weight").double()
    return functional.pad(weight, (0, 0, 0, case.padded_vocab - case.vocab))


def test_rows_that_a_split_table_looks_up_otherwise() -> None:
    case = Case.parse(f"mode=tp tp=3 {SIZES} micro=1 positions=rope hidden=12 heads=3 kv_heads=3")
    found, ids = alternatives(case, CPU), micro_batch(case, 0, 0, 0).tokens
    unmasked, late = torch.zeros(2, 8, 12).double(), torch.zeros(2, 8, 12).double()
    for rank, rows in enumerate(table(case).chunk(3)):
        first = rank * len(rows)
        local = ids - first
        unmasked += rows[local.masked_fill((local < 0) | (local >= len(rows)), 0)]
        local = local + (first > 0)
        outside = (local < 0) | (local >= len(rows))
        late += rows[local.masked_fill(outside, 0)].masked_fill(outside[..., None], 0)
    close(found["foreign_rows.3/act/embedding"], unmasked)
    close(found["rows_late.3/act/embedding"], late)
    columns = torch.cat([columns[ids] for columns in table(case).chunk(3, -1)])
    close(found["flat_dim.3/act/embedding"], columns.reshape(2, 8, 12))


def test_a_tied_gradient_is_the_sum_of_its_two_uses() -> None:
    case = Case.parse(f"mode=tp tp=1 {SIZES} micro=2 tied=true")
    name = "grad/embedding.tokens.weight"
    found, truth = alternatives(case, CPU), dense.truth(case, CPU)[name]
    looked_up, head = (found[f"tied_part.{missing}/{name}"] for missing in ("head", "embedding"))
    close(looked_up + head, truth)
    close(found[f"tied_twice.head/{name}"], truth + head)
    close(found[f"tied_twice.embedding/{name}"], truth + looked_up)
    read = torch.cat([micro_batch(case, 0, micro, 0).tokens.flatten() for micro in range(2)]).unique()
    unread = torch.ones(case.vocab, dtype=torch.bool).index_fill(0, read, False)
    assert not looked_up[unread].any() and head[unread].any()
    assert not any(key.startswith("tied_") for key in alternatives(case.but(tied=False), CPU))


def test_losses_under_other_rules_of_what_counts() -> None:
    case = Case.parse(f"mode=tp tp=2 {SIZES} micro=1 label_smoothing=0.1")
    found, logits = alternatives(case, CPU), dense.truth(case, CPU)["logits/0"]
    batch = micro_batch(case, 0, 0, 0)
    known = batch.labels != -100
    counts, labels = (batch.loss_mask * known).double(), batch.labels.where(known, 0)

    def mean(losses: Tensor) -> Tensor:
        return (losses * counts).sum() / counts.sum()

    def hits(x: Tensor) -> Tensor:
        return x.gather(-1, labels[..., None])[..., 0]

    close(found["smoothing_missing/loss/0"], mean(-hits(logits.log_softmax(-1))))
    x = logits - logits.amax(-1, keepdim=True)
    spread = 0.1 / (case.padded_vocab // 2 - 1)
    by_part = x.exp().sum(-1).log() - (1 - 0.1 - spread) * hits(x) - spread * x.sum(-1)
    close(found["smoothing_by_part.2/loss/0"], mean(by_part))
    torchs = functional.cross_entropy(logits.movedim(-1, 1), labels, reduction="none", label_smoothing=0.1)
    close(found["smoothing_over_all.label/loss/0"], mean(torchs))
    for reading, classes in (("count", case.vocab), ("padding", case.padded_vocab - 1)):
        wide = x.exp().sum(-1).log() - (1 - 0.1 - 0.1 / classes) * hits(x) - 0.1 / classes * x.sum(-1)
        close(found[f"smoothing_over_all.{reading}/loss/0"], mean(wide))
    own = -0.9 * hits(logits.log_softmax(-1)) - 0.1 / (case.vocab - 1) * (
        logits.log_softmax(-1).sum(-1) - hits(logits.log_softmax(-1))
    )
    rows = (own * counts).sum(-1) / counts.sum(-1)
    close(found["local_count.rows/loss/0"], rows.mean())
    plain = case.but(label_smoothing=0.0)
    found, padding = alternatives(plain, CPU), case.padded_vocab - case.vocab
    log = functional.pad(logits, (0, padding)).log_softmax(-1)
    close(found["padding_counted/loss/0"], mean(-hits(log)))
    unlabelled = x.exp().sum(-1).log()
    masked = batch.loss_mask.double()
    every = (-hits(logits.log_softmax(-1))).where(known, unlabelled) * masked
    close(found["ignored_learned/loss/0"], every.sum() / masked.sum())
    assert not any(key.startswith("smoothing_") for key in found)
