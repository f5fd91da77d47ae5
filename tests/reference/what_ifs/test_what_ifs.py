"""What-ifs of the dense model: each is its own mathematics on what truth's own activations say, read otherwise."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from reference.case import Case
from reference.data.batches import micro_batch
from reference.model import decoder, layers
from reference.model.parameters import full, shapes
from reference.training import subject as dense
from reference.what_ifs.inputs import alternatives

CPU = torch.device("cpu")
SIZES = "layers=1 hidden=16 heads=4 kv_heads=2 ffn=12 seq=8 vocab=264 steps=1"
FUSED = Case.parse(
    f"mode=tp tp=2 {SIZES} batch=2 micro=1 fuse_qkv=true fuse_mlp=true activation=swiglu positions=rope bias=true"
)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def through(case: Case, leaf: str, x: Tensor) -> Tensor:
    weight, bias = (full(case, f"layers.0.{leaf}.{kind}").double() for kind in ("weight", "bias"))
    return functional.linear(x, weight, bias)


def attended(case: Case, q: Tensor, k: Tensor, v: Tensor, *, rotated: bool = True) -> Tensor:
    positions = micro_batch(case, 0, 0, 0).positions
    if rotated:
        q, k = layers.rotate(q, positions), layers.rotate(k, positions)
    return through(case, "attention.wo", layers.attention(q, k, v, layers.visible(case.seq, None, CPU)))


def test_attention_of_fused_rows_that_are_read_otherwise() -> None:
    found, rows = alternatives(FUSED, CPU), dense.true_activations(FUSED, CPU)["act/layers.0.attention.wqkv"]
    q, k, v = layers.split_qkv(rows, 4, 2)
    close(found["kv_exchanged/act/layers.0.attention.wo"], attended(FUSED, q, v, k))
    close(found["positions_missing/act/layers.0.attention.wo"], attended(FUSED, q, k, v, rotated=False))
    for parts in (1, 2):
        heads = [part.unflatten(-1, (-1, 4)) for part in rows.chunk(parts, -1)]
        cut = [part.split([4 // parts, 2 // parts, 2 // parts], -2) for part in heads]
        q, k, v = (torch.cat(pieces, -2) for pieces in zip(*cut, strict=True))
        close(found[f"fused_cut.qkv{parts}/act/layers.0.attention.wo"], attended(FUSED, q, k, v))


def test_gate_and_up_that_are_read_otherwise() -> None:
    found, rows = alternatives(FUSED, CPU), dense.true_activations(FUSED, CPU)["act/layers.0.mlp.w13"]
    gate, up = rows.chunk(2, -1)
    close(found["gate_exchanged/act/layers.0.mlp.w2"], through(FUSED, "mlp.w2", functional.silu(up) * gate))
    halves = [part.chunk(2, -1) for part in rows.chunk(2, -1)]
    inner = torch.cat([functional.silu(gate) * up for gate, up in halves], -1)
    close(found["fused_cut.w13/act/layers.0.mlp.w2"], through(FUSED, "mlp.w2", inner))


def test_weights_that_stand_still() -> None:
    case = FUSED.but(steps=2)
    weights = {name: full(case, name).double() for name in shapes(case)}
    second = decoder.logits(case, weights, micro_batch(case, 1, 0, 0))
    torch.testing.assert_close(alternatives(case, CPU)["never_updated/logits/1"], second, rtol=1e-5, atol=1e-6)


def test_data_that_repeat() -> None:
    case = Case.parse(f"mode=tp tp=1 dp=3 {SIZES} batch=2 micro=2")
    found, truth = alternatives(case, CPU), dense.truth(case, CPU)["logits/0"].unflatten(0, (3, 2, 2))
    close(found["data_rank_repeated/logits/0"], truth[:1].expand_as(truth).flatten(0, 2))
    close(found["micro_repeated/logits/0"], truth[:, :1].expand_as(truth).flatten(0, 2))
    alone = alternatives(case.but(dp=1, micro=1), CPU)
    assert not any(name.startswith(("data_rank_repeated/", "micro_repeated/")) for name in alone)


def test_positions_that_begin_anew() -> None:
    case = Case.parse(f"mode=isp tp=2 {SIZES} batch=2 micro=1 positions=learned")
    table = full(case, "embedding.positions.weight").double()
    moved = (
        alternatives(case, CPU)["positions_restart/act/embedding"] - dense.true_activations(case, CPU)["act/embedding"]
    )
    close(moved, (torch.cat([table[:4], table[:4]]) - table)[None].expand(2, -1, -1))
    assert not any(name.startswith("positions_restart/") for name in alternatives(case.but(tp=1, wp=1), CPU))


def test_labels_that_are_shifted_twice() -> None:
    case = Case.parse(f"mode=tp tp=1 {SIZES} batch=2 micro=1")
    found, logits, batch = alternatives(case, CPU), dense.truth(case, CPU)["logits/0"], micro_batch(case, 0, 0, 0)
    for reading, last in (("rolled", batch.labels[:, :1]), ("cut", torch.full_like(batch.labels[:, :1], -100))):
        labels = torch.cat((batch.labels[:, 1:], last), 1)
        losses = functional.cross_entropy(logits.movedim(-1, 1), labels, reduction="none", ignore_index=-100)
        counts = batch.loss_mask.double() * (labels != -100)
        close(found[f"labels_shifted_twice.{reading}/loss/0"], (losses * counts).sum() / counts.sum())
