"""Where DeepSpeed's own functions cut wrongly, they cut as the deviation of that name says, and the laws see it.

Inputs are drawn from a seed. Rows are numbered, so that equal results mean the same rows in the same order.
"""

from __future__ import annotations

import random
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from parallel.slicing.errors import SliceError
from parallel.slicing.heads import Heads, query_rows
from parallel.slicing.held import in_turn
from parallel.slicing.sizes import shard_sizes
from parallel.slicing.strided import placed, plain, scales, strided
from tests.parallel.slicing.deepspeed_copies import Named, copied, imported, numbered, parts_of, same
from tests.parallel.slicing.deviations import DEVIATIONS
from tests.parallel.slicing.laws import broken

deepspeed = imported()
pytestmark = pytest.mark.peers


def heads_for(name: str, source: random.Random) -> tuple[Heads, int]:
    while True:
        ranks, kv = source.randint(2, 5), source.randint(1, 12)
        group = 1 if name == "odd-shared-heads" else source.randint(1, 6)
        heads = Heads(query=kv * group, kv=kv, size=source.randint(1, 6))
        if DEVIATIONS[name].needs(heads, ranks) and not (name == "grouped-thirds" and kv == 2):
            return heads, ranks


def expected(name: str, heads: Heads, ranks: int, whole: Tensor) -> list[Tensor]:
    """What the deviation cuts; its laws are broken."""
    deviation = DEVIATIONS[name]
    held = deviation.held(heads, ranks)
    if deviation.order:
        context = query_rows(heads, ranks, spare="empty")
        assert broken(held, heads.fused, heads=heads, order=deviation.order, context=context)
    else:
        assert broken(held, heads.query * heads.size, unit=heads.size)
    return parts_of(whole, held)


@pytest.mark.parametrize("way", ["strided_copy", "glmtype"])
def test_grouped_thirds(way: str) -> None:
    source = random.Random(way)
    for _ in range(300):
        heads, ranks = heads_for("grouped-thirds", source)
        whole = numbered((heads.fused, 2))
        if way == "strided_copy":
            theirs = copied(deepspeed, way, whole, (heads.fused // ranks, 2), ranks, "out-in", num_splits=3)
        else:
            meta = deepspeed.meta(num_attention_heads=heads.query, n_embd=heads.query * heads.size)
            theirs = [deepspeed.fused(Named("GLMBlock"), whole, ranks, rank, meta) for rank in range(ranks)]
        assert same(expected("grouped-thirds", heads, ranks, whole), theirs)


def test_decoder_layer_thirds() -> None:
    """Any layer called *DecoderLayer; the meta's kv heads may move the cuts, which are wrong all the same."""
    source = random.Random("decoder")
    for _ in range(300):
        heads, ranks = heads_for("decoder-layer-thirds", source)
        whole = numbered((heads.fused, 2))
        meta = deepspeed.meta(n_embd=heads.query * heads.size)
        theirs = [deepspeed.fused(Named("PersimmonDecoderLayer"), whole, ranks, rank, meta) for rank in range(ranks)]
        assert same(expected("decoder-layer-thirds", heads, ranks, whole), theirs)


def test_container_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of DeepSpeedSelfAttention's buffers, its kernels left out."""
    monkeypatch.setattr(deepspeed.op, "inference_module", MagicMock())
    monkeypatch.setattr(deepspeed.attention, "num_layers", 0)
    source = random.Random("container")
    for _ in range(50):
        heads, ranks = heads_for("container-size", source)
        hidden = heads.query * heads.size
        config = deepspeed.config(
            hidden_size=hidden, heads=heads.query, num_kv=heads.kv, mp_size=ranks, dtype=torch.float32
        )
        attention = deepspeed.attention(config)
        parts = expected("container-size", heads, ranks, numbered((heads.fused,)))
        assert {len(part) for part in parts} == {attention.attn_qkvw.shape[1]} == {attention.attn_qkvb.shape[0]}
        assert attention.attn_ow.shape == (hidden // ranks, hidden) and attention.attn_ob.shape == (hidden,)
    config = deepspeed.config(hidden_size=768, heads=12, mp_size=2, dtype=torch.float32)
    assert deepspeed.attention(config).attn_qkvw.shape == (768, 1152), "seed 004"


def test_half_heads() -> None:
    """Query, key and value copied by themselves into equal buffers, as HybridSplitQKVContainer does."""
    source = random.Random("half")
    for _ in range(300):
        heads, ranks = heads_for("half-heads", source)
        whole = numbered((heads.fused, 2))
        query, kv = heads.query * heads.size, heads.kv * heads.size
        pieces = [
            copied(deepspeed, "copy", own, (len(own) // ranks, 2), ranks, "out-in")
            for own in whole.split([query, kv, kv])
        ]
        theirs = [torch.cat(own) for own in zip(*pieces, strict=True)]
        assert same(expected("half-heads", heads, ranks, whole), theirs)


def test_dropped_remainder() -> None:
    source = random.Random("dropped")
    for _ in range(300):
        heads, ranks = heads_for("dropped-remainder", source)
        whole = numbered((heads.fused,))
        if heads.fused < ranks:
            continue
        theirs = copied(deepspeed, "copy", whole, (heads.fused // ranks,), ranks, "in-out")
        assert same(expected("dropped-remainder", heads, ranks, whole), theirs)
        with pytest.raises(SliceError, match="the rest would be lost"):
            plain((heads.fused,), (heads.fused // ranks,), ranks=ranks)


def test_queries_by_features() -> None:
    source = random.Random("features")
    for _ in range(300):
        heads, ranks = heads_for("queries-by-features", source)
        rows = heads.query * heads.size
        meta = deepspeed.meta(num_kv_heads=heads.kv)
        theirs = numbered((rows,)).split(deepspeed.sizes(rows, ranks, meta, "self_attn.w1proj"))
        assert same(expected("queries-by-features", heads, ranks, numbered((rows,))), list(theirs))
        right = in_turn(shard_sizes(rows, ranks, kv_heads=heads.kv, name="self_attn.w1proj"))
        assert broken(right, rows, unit=heads.size) == []


def test_odd_shared_heads() -> None:
    source = random.Random("odd")
    for _ in range(100):
        heads, ranks = heads_for("odd-shared-heads", source)
        held = DEVIATIONS["odd-shared-heads"].held(Heads(query=heads.query, kv=heads.kv, size=1), ranks)
        found = [[row for part in own for row in part] for own in held]
        assert found == [deepspeed.shared(heads.query, ranks, rank) for rank in range(ranks)]


def test_whole_scales() -> None:
    """The scale is attached whole, however many blocks of rows it has; ours follow the rows."""
    weight = numbered((12, 4), torch.int8)
    weight.scale = torch.arange(12.0)[:, None]  # type: ignore[attr-defined]
    place = strided((12, 4), (6, 4), ranks=2, parts=(4, 4, 4), orientation="out-in")
    for rank in range(2):
        replace = deepspeed.slicing(mp_size=2, out_dim=0, in_dim=1)
        replace.gpu_index = rank
        part = replace.strided_copy(torch.empty(6, 4, dtype=torch.int8), weight, num_splits=3, int8=True)
        assert part.scale is weight.scale  # type: ignore[attr-defined]
        own = placed(weight.scale, scales(place, (12, 1)), rank=rank, ranks=2)  # type: ignore[attr-defined]
        assert own is not None and own.flatten().tolist() == [part.data[row, 0].item() // 4 for row in range(6)]


def test_every_deviation_has_its_test_here() -> None:
    assert set(DEVIATIONS) <= {name.removeprefix("test_").replace("_", "-") for name in globals()}
