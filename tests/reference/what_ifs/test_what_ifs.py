"""What-ifs of the dense model: each is its own mathematics on what truth's own activations say, read otherwise.

Exchanged heads are held against ranks that send and receive flat memory as the bug would. Tables and losses are held
against the split program that has the bug."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shardproof.reference.case import Case
from shardproof.reference.data.batches import micro_batch
from shardproof.reference.model import decoder, layers
from shardproof.reference.model.parameters import shapes
from shardproof.reference.training import subject as dense
from shardproof.reference.what_ifs.rules import what_ifs
from tests.reference.what_ifs import CPU, attended, broken, close, projected, through, weight

SIZES = "layers=1 hidden=16 heads=4 kv_heads=2 ffn=12 seq=8 vocab=264 steps=1"
FUSED = Case.parse(
    f"mode=tp tp=2 {SIZES} batch=2 micro=1 fuse_qkv=true fuse_mlp=true activation=swiglu positions=rope bias=true"
)


def rotated(case: Case, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    positions = micro_batch(case, 0, 0, 0).positions
    return layers.rotate(q, positions), layers.rotate(k, positions)


def test_attention_of_fused_rows_that_are_read_otherwise() -> None:
    found, rows = broken(FUSED), dense.true_activations(FUSED, CPU)["act/layers.0.attention.wqkv"]
    q, k, v = layers.split_qkv(rows, 4, 2)
    close(found["kv_exchanged/act/layers.0.attention.wo"], attended(FUSED, *rotated(FUSED, q, v), k))
    close(found["positions_missing/act/layers.0.attention.wo"], attended(FUSED, q, k, v))
    for parts in (1, 2):
        heads = [part.unflatten(-1, (-1, 4)) for part in rows.chunk(parts, -1)]
        cut = [part.split([4 // parts, 2 // parts, 2 // parts], -2) for part in heads]
        q, k, v = (torch.cat(pieces, -2) for pieces in zip(*cut, strict=True))
        close(found[f"fused_cut.qkv{parts}/act/layers.0.attention.wo"], attended(FUSED, *rotated(FUSED, q, k), v))


def test_gate_and_up_that_are_read_otherwise() -> None:
    found, rows = broken(FUSED), dense.true_activations(FUSED, CPU)["act/layers.0.mlp.w13"]
    gate, up = rows.chunk(2, -1)
    close(found["gate_exchanged/act/layers.0.mlp.w2"], through(FUSED, "mlp.w2", functional.silu(up) * gate))
    halves = [part.chunk(2, -1) for part in rows.chunk(2, -1)]
    inner = torch.cat([functional.silu(gate) * up for gate, up in halves], -1)
    close(found["fused_cut.w13/act/layers.0.mlp.w2"], through(FUSED, "mlp.w2", inner))


def test_weights_that_stand_still() -> None:
    case = FUSED.but(steps=2)
    weights = {name: weight(case, name) for name in shapes(case)}
    second = decoder.logits(case, weights, micro_batch(case, 1, 0, 0))
    torch.testing.assert_close(broken(case)["never_updated/logits/1"], second, rtol=1e-5, atol=1e-6)


def test_data_that_repeat() -> None:
    case = Case.parse(f"mode=tp tp=1 dp=3 {SIZES} batch=2 micro=2")
    found, truth = broken(case), dense.truth(case, CPU)["logits/0"].unflatten(0, (3, 2, 2))
    close(found["data_rank_repeated/logits/0"], truth[:1].expand_as(truth).flatten(0, 2))
    close(found["micro_repeated/logits/0"], truth[:, :1].expand_as(truth).flatten(0, 2))
    alone = broken(case.but(dp=1, micro=1))
    assert not any(name.startswith(("data_rank_repeated/", "micro_repeated/")) for name in alone)


def test_positions_that_begin_anew() -> None:
    case = Case.parse(f"mode=isp tp=2 {SIZES} batch=2 micro=1 positions=learned")
    table = weight(case, "embedding.positions.weight")
    moved = broken(case)["positions_restart/act/embedding"] - dense.true_activations(case, CPU)["act/embedding"]
    close(moved, (torch.cat([table[:4], table[:4]]) - table)[None].expand(2, -1, -1))
    assert not any(name.startswith("positions_restart/") for name in broken(case.but(tp=1, wp=1)))


def test_labels_that_are_shifted_twice() -> None:
    case = Case.parse(f"mode=tp tp=1 {SIZES} batch=2 micro=1")
    found, logits, batch = broken(case), dense.truth(case, CPU)["logits/0"], micro_batch(case, 0, 0, 0)
    for reading, last in (("rolled", batch.labels[:, :1]), ("cut", torch.full_like(batch.labels[:, :1], -100))):
        labels = torch.cat((batch.labels[:, 1:], last), 1)
        losses = functional.cross_entropy(logits.movedim(-1, 1), labels, reduction="none", ignore_index=-100)
        counts = batch.loss_mask.double() * (labels != -100)
        close(found[f"labels_shifted_twice.{reading}/loss/0"], (losses * counts).sum() / counts.sum())


TABLES = "layers=1 hidden=8 heads=2 kv_heads=2 ffn=12 seq=8 batch=2 vocab=264 steps=1"


def padded_table(case: Case) -> Tensor:
    return functional.pad(weight(case, "embedding.tokens.weight"), (0, 0, 0, case.padded_vocab - case.vocab))


def test_rows_that_a_split_table_looks_up_otherwise() -> None:
    case = Case.parse(f"mode=tp tp=3 {TABLES} micro=1 positions=rope hidden=12 heads=3 kv_heads=3")
    found, ids = broken(case), micro_batch(case, 0, 0, 0).tokens
    unmasked, late = torch.zeros(2, 8, 12).double(), torch.zeros(2, 8, 12).double()
    for rank, rows in enumerate(padded_table(case).chunk(3)):
        first = rank * len(rows)
        local = ids - first
        unmasked += rows[local.masked_fill((local < 0) | (local >= len(rows)), 0)]
        local = local + (first > 0)
        outside = (local < 0) | (local >= len(rows))
        late += rows[local.masked_fill(outside, 0)].masked_fill(outside[..., None], 0)
    close(found["foreign_rows.3/act/embedding"], unmasked)
    close(found["rows_late.3/act/embedding"], late)
    columns = torch.cat([columns[ids] for columns in padded_table(case).chunk(3, -1)])
    close(found["flat_dim.3/act/embedding"], columns.reshape(2, 8, 12))


def test_a_tied_gradient_is_the_sum_of_its_two_uses() -> None:
    case = Case.parse(f"mode=tp tp=1 {TABLES} micro=2 tied=true")
    name = "grad/embedding.tokens.weight"
    found, truth = broken(case), dense.truth(case, CPU)[name]
    looked_up, head = (found[f"tied_part.{missing}/{name}"] for missing in ("head", "embedding"))
    close(looked_up + head, truth)
    close(found[f"tied_twice.head/{name}"], truth + head)
    close(found[f"tied_twice.embedding/{name}"], truth + looked_up)
    read = torch.cat([micro_batch(case, 0, micro, 0).tokens.flatten() for micro in range(2)]).unique()
    unread = torch.ones(case.vocab, dtype=torch.bool).index_fill(0, read, False)
    assert not looked_up[unread].any() and head[unread].any()
    assert not any(key.startswith("tied_") for key in broken(case.but(tied=False)))


def test_losses_under_other_rules_of_what_counts() -> None:
    case = Case.parse(f"mode=tp tp=2 {TABLES} micro=1 label_smoothing=0.1")
    found, logits = broken(case), dense.truth(case, CPU)["logits/0"]
    batch = micro_batch(case, 0, 0, 0)
    known = batch.labels != -100
    counts, labels = (batch.loss_mask * known).double(), batch.labels.where(known, 0)

    def mean(losses: Tensor) -> Tensor:
        return (losses * counts).sum() / counts.sum()

    def hits(x: Tensor) -> Tensor:
        return x.gather(-1, labels[..., None])[..., 0]

    def smoothed(x: Tensor, classes: int) -> Tensor:
        return x.exp().sum(-1).log() - (1 - 0.1 - 0.1 / classes) * hits(x) - 0.1 / classes * x.sum(-1)

    close(found["smoothing_missing/loss/0"], mean(-hits(logits.log_softmax(-1))))
    x = logits - logits.amax(-1, keepdim=True)
    torchs = functional.cross_entropy(logits.movedim(-1, 1), labels, reduction="none", label_smoothing=0.1)
    close(found["smoothing_over_all.label/loss/0"], mean(torchs))
    readings = {"by_part.2": case.padded_vocab // 2 - 1, "over_all.count": case.vocab}
    for reading, classes in {**readings, "over_all.padding": case.padded_vocab - 1}.items():
        close(found[f"smoothing_{reading}/loss/0"], mean(smoothed(x, classes)))
    own = smoothed(x, case.vocab - 1) * counts
    close(found["local_count.rows/loss/0"], (own.sum(-1) / counts.sum(-1)).mean())
    found = broken(case.but(label_smoothing=0.0))
    padded = functional.pad(logits, (0, case.padded_vocab - case.vocab)).log_softmax(-1)
    close(found["padding_counted/loss/0"], mean(-hits(padded)))
    unlabelled, masked = x.exp().sum(-1).log(), batch.loss_mask.double()
    every = (-hits(logits.log_softmax(-1))).where(known, unlabelled) * masked
    close(found["ignored_learned/loss/0"], every.sum() / masked.sum())
    assert not any(key.startswith("smoothing_") for key in found)


RANKS = 4
EXCHANGED = Case.parse(
    f"mode=isp tp={RANKS} layers=1 hidden=16 heads=4 kv_heads=2 ffn=12 seq=8 batch=2 micro=1 steps=1 vocab=264 "
    "positions=learned norm=layernorm bias=true fuse_qkv=false"
)


def exchange(xs: Sequence[Tensor], split: int, gather: int, *, cut: bool = True, join: bool = True) -> list[Tensor]:
    """An all-to-all of equal parts of flat memory; wrong where it is not `cut` or not `join`ed along its dims."""
    sent = []
    for x in xs:
        parts = torch.cat(x.chunk(RANKS, split))
        sent.append((parts if cut else x.contiguous().reshape(parts.shape)).chunk(RANKS))
    received = [torch.cat([parts[rank] for parts in sent]) for rank in range(RANKS)]
    joined = [torch.cat(y.chunk(RANKS), gather) for y in received]
    return joined if join else [y.reshape(right.shape) for y, right in zip(received, joined, strict=True)]


def attended_by_ranks(*, order: str = "beside", mixed: bool = False, cut: bool = True, join: bool = True) -> Tensor:
    """The output of attention by ranks that exchange so."""
    by_rank = [x.chunk(RANKS, 1) for x in projected(EXCHANGED)]
    kv = [torch.stack(pair, 2) for pair in zip(*by_rank[1:], strict=True)]
    kv = [x.repeat_interleave(2, 3) if order == "beside" else x.repeat(1, 1, 1, 2, 1) for x in kv]
    queries = exchange(by_rank[0], 2, 1, cut=cut, join=join)
    queries = [q.transpose(0, 1).reshape(q.shape) if mixed else q for q in queries]
    visible, contexts = layers.visible(EXCHANGED.seq, None, CPU), []
    for q, both in zip(queries, exchange(kv, 3, 1, cut=cut, join=join), strict=True):
        k, v = both.unbind(2)
        contexts.append(layers.attention(q, k, v, visible).unflatten(-1, (-1, EXCHANGED.head_dim)))
    context = torch.cat(exchange(contexts, 1, 2, cut=cut, join=join), 1).flatten(2)
    return through(EXCHANGED, "attention.wo", context)


def test_exchanges_gone_wrong() -> None:
    found, wo = broken(EXCHANGED), "act/layers.0.attention.wo"
    close(attended_by_ranks(), dense.true_activations(EXCHANGED, CPU)[wo])
    close(found[f"flat_dim.joined/{wo}"], attended_by_ranks(join=False))
    close(found[f"flat_dim.cut/{wo}"], attended_by_ranks(cut=False))
    close(found[f"transposed.q/{wo}"], attended_by_ranks(mixed=True))
    close(found[f"kv_order/{wo}"], attended_by_ranks(order="one after the other"))
    assert not any(key.startswith(("transposed.", "kv_order/")) for key in broken(EXCHANGED.but(mode="tp", tp=2)))


def test_copies_of_which_one_alone_gives_a_gradient() -> None:
    """With as many query heads as copies, the first query head of a kv head alone moves it."""
    found, truth = broken(EXCHANGED), dense.true_activations(EXCHANGED, CPU)
    wo, wk = "layers.0.attention.wo", "layers.0.attention.wk"
    assert torch.equal(found[f"kv_alone/act/{wo}"], truth[f"act/{wo}"])
    q, k, v = (x.detach() for x in projected(EXCHANGED))
    k = k.repeat_interleave(2, 2).requires_grad_()
    context = layers.attention(q, k, v.repeat_interleave(2, 2), layers.visible(EXCHANGED.seq, None, CPU))
    slope = truth[f"act_grad/{wo}"] @ weight(EXCHANGED, f"{wo}.weight")
    (grad,) = torch.autograd.grad(context, k, slope)
    close(found[f"kv_alone/act_grad/{wk}"], grad[:, :, ::2].flatten(2))
    close(truth[f"act_grad/{wk}"], (grad[:, :, ::2] + grad[:, :, 1::2]).flatten(2))


def test_logits_of_which_each_part_learns_its_own_labels() -> None:
    found, truth = broken(EXCHANGED), dense.true_activations(EXCHANGED, CPU)["act_grad/head"]
    labels, columns = micro_batch(EXCHANGED, 0, 0, 0).labels, EXCHANGED.padded_vocab // RANKS
    expected = torch.zeros_like(truth)
    for first in range(0, EXCHANGED.vocab, columns):
        mine = (labels >= first) & (labels < first + columns)
        expected[..., first : first + columns] = truth[..., first : first + columns] * mine[..., None]
    close(found[f"own_labels.{RANKS}/act_grad/head"], expected)


DIFFERENCES = (
    "mode=isp tp=4 kv_heads=2 batch=2 positions=learned fuse_qkv=true fuse_mlp=true activation=swiglu layers=2",
    "mode=tp tp=2 dp=2 micro=2 steps=2 positions=rope tied=true label_smoothing=0.1 clip=0.1 optimizer=adamw vocab=257",
    "mode=mtp family=internlm2 tp=2 cp=2 packed=true vocab=510",
    "mode=mtp family=internlm2 tp=2 metric=true micro=2 steps=2 vocab=510",
)


def test_every_rule_makes_a_difference_in_some_case() -> None:
    small = "hidden=16 heads=4 ffn=12 seq=16"
    found = {key for text in DIFFERENCES for key in broken(Case.parse(f"{text} {small}"))}
    assert {rule.id for rule in what_ifs()} == {key.partition("/")[0].partition(".")[0] for key in found}
