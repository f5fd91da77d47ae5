"""DeepSpeed's own functions cut as ours wherever they are right; where they are wrong they cut as the deviation says.

Inputs are drawn from a seed. Rows are numbered, so that equal results mean the same rows in the same order."""

from __future__ import annotations

import random
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from parallel.communication.layout import Placement
from parallel.slicing.errors import SliceError
from parallel.slicing.heads import Heads, fused_rows, query_rows, shared_qk_rows
from parallel.slicing.held import in_turn
from parallel.slicing.sizes import shard_sizes
from parallel.slicing.strided import equal_parts, placed, plain, scales, strided
from tests.parallel.slicing.deepspeed_copies import Named, copied, imported, numbered, parts_of, same
from tests.parallel.slicing.deviations import DEVIATIONS
from tests.parallel.slicing.laws import broken

deepspeed = imported()
pytestmark = pytest.mark.peers
DRAWS = 1500
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
BLOCKS = ("GLMBlock", "MPTBlock", "MptBlock", "BaichuanLayer", "QWenBlock", "SomeDecoderLayer")
GROUPS = ("BloomBlock", "FalconDecoderLayer", "GPTNeoXLayer")


def ours_placed(whole: Tensor, place: Placement, ranks: int) -> list[Tensor]:
    found = [placed(whole, place, rank=rank, ranks=ranks) for rank in range(ranks)]
    return [part for part in found if part is not None]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("orientation", ["in-out", "out-in"])
def test_strided_copy(orientation: str, bias: bool) -> None:
    source = random.Random(f"strided {orientation} {bias}")
    for _ in range(DRAWS):
        ranks, splits = source.randint(2, 5), source.randint(1, 4)
        out, inner = ranks * splits * source.randint(1, 4), source.randint(1, 5)
        dim = 1 if orientation == "in-out" and not bias else 0
        src = (out,) if bias else (inner, out) if dim else (out, inner)
        dst = tuple(size // ranks if at == dim else size for at, size in enumerate(src))
        whole = numbered(src, source.choice(DTYPES))
        allocate = source.random() < 0.5
        theirs = copied(
            deepspeed, "strided_copy", whole, dst, ranks, orientation, num_splits=splits, allocate_tensor=allocate
        )
        place = strided(src, dst, ranks=ranks, parts=equal_parts(out, splits), orientation=orientation)
        assert same(ours_placed(whole, place, ranks), theirs), (src, dst, ranks, splits)


@pytest.mark.parametrize("cut", ["outputs", "inputs", "bias"])
@pytest.mark.parametrize("orientation", ["in-out", "out-in"])
def test_copy(orientation: str, cut: str) -> None:
    source = random.Random(f"copy {orientation} {cut}")
    for _ in range(DRAWS):
        ranks = source.randint(2, 5)
        long, other = ranks * source.randint(1, 4), source.randint(1, 5)
        dim = 0 if cut == "bias" else int((orientation == "in-out") == (cut == "outputs"))
        src = (long,) if cut == "bias" else (other, long) if dim else (long, other)
        dst = tuple(size // ranks if at == dim else size for at, size in enumerate(src))
        whole = numbered(src, source.choice(DTYPES))
        theirs = copied(deepspeed, "copy", whole, dst, ranks, orientation, allocate_tensor=source.random() < 0.5)
        assert same(ours_placed(whole, plain(src, dst, ranks=ranks, orientation=orientation), ranks), theirs)


@pytest.mark.parametrize("call", ["strided_copy", "copy"])
def test_what_is_whole_is_whole_and_a_merge_is_refused(call: str) -> None:
    words = {"num_splits": 3} if call == "strided_copy" else {}
    for src in ((4, 6), (6,)):
        whole = numbered(src)
        assert same([whole, whole], copied(deepspeed, call, whole, src, 2, "in-out", **words))
        assert same([whole, whole], ours_placed(whole, plain(src, src, ranks=2), 2))
    replace = deepspeed.slicing(mp_size=2)
    assert getattr(replace, call)(torch.empty(4, 6), None, **words) is None
    with pytest.raises(AssertionError, match="Merging tensors is not allowed"):
        copied(deepspeed, call, numbered((4, 6)), (4, 9), 2, "in-out", **words)
    with pytest.raises(SliceError, match="slicing cuts and never merges"):
        plain((4, 6), (4, 9), ranks=2)


def test_sizes() -> None:
    source = random.Random("sizes")
    names = ("", "fc1", "self_attn.q_proj", "mlp.down_proj", "lm_head", "embed_out", "block.w2", "mlp.dense_h_to_4h")
    for _ in range(2 * DRAWS):
        total, ranks, grain = source.randint(1, 300), source.randint(1, 9), source.choice((1, 1, 2, 16, 64))
        kv_heads, name = source.choice((None, source.randint(1, 16))), source.choice(names)
        meta = deepspeed.meta(num_kv_heads=kv_heads, tp_grain_size=grain)
        theirs = deepspeed.sizes(total, ranks, meta, name or None)
        assert shard_sizes(total, ranks, kv_heads=kv_heads, grain=grain, name=name) == tuple(theirs)


def fused(name: str, heads: Heads, ranks: int, whole: Tensor, n_embd: int | None = None) -> list[Tensor]:
    meta = deepspeed.meta(
        num_kv_heads=heads.kv, num_attention_heads=heads.query, n_embd=n_embd or heads.query * heads.size
    )
    return [deepspeed.fused(Named(name), whole, ranks, rank, meta) for rank in range(ranks)]


def drawn_heads(source: random.Random, *, grouped: bool) -> tuple[Heads, int]:
    ranks = source.randint(2, 5)
    kv = source.randint(ranks, ranks + 6)
    return Heads(query=kv * (source.randint(1, 4) if grouped else 1), kv=kv, size=source.randint(1, 4)), ranks


@pytest.mark.parametrize("name", [*BLOCKS, *GROUPS, "Phi3DecoderLayer"])
def test_fused_weights(name: str) -> None:
    """Blocks with as many key as query heads, or two of them; groups and Phi-3 with any."""
    source = random.Random(name)
    order = "groups" if name in GROUPS else "blocks"
    for _ in range(DRAWS // 2):
        heads, ranks = drawn_heads(source, grouped=order == "groups" or name.startswith("Phi3"))
        if order == "blocks" and source.random() < 0.3:
            heads, ranks = Heads(query=2 * source.randint(1, 5), kv=2, size=heads.size), 2
        columns = heads.query * heads.size if name.startswith("Phi3") else 2
        bias = source.random() < 0.3 and not name.startswith("Phi3")
        whole = numbered((heads.fused,) if bias else (heads.fused, columns))
        theirs = fused(name, heads, ranks, whole)
        assert same(parts_of(whole, fused_rows(heads, ranks, order)), theirs), (heads, ranks)


def test_codegen() -> None:
    source = random.Random("codegen")
    for _ in range(DRAWS // 2):
        ranks = source.randint(2, 5)
        count = 4 * ranks * source.randint(1, 3)
        heads = Heads(query=count, kv=count, size=source.randint(1, 4))
        whole = numbered((heads.fused, 2))
        assert same(parts_of(whole, fused_rows(heads, ranks, "codegen")), fused("CodeGenBlock", heads, ranks, whole))
    with pytest.raises(AssertionError, match="num_kv_heads"):
        fused("CodeGenBlock", Heads(query=4, kv=4, size=1), 2, numbered((12, 2)))
    with pytest.raises(SliceError, match="multiple of the 4 blocks of CodeGen"):
        fused_rows(Heads(query=4, kv=4, size=1), 2, "codegen")


def test_one_kv_head_for_all() -> None:
    """BigCode: the kv head is whole on every rank; queries are shared evenly when the meta counts query heads."""
    source = random.Random("bigcode")
    for _ in range(DRAWS // 2):
        ranks = source.randint(2, 5)
        heads = Heads(query=ranks * source.randint(1, 4), kv=1, size=source.randint(1, 4))
        whole = numbered((heads.fused, 2))
        meta = deepspeed.meta(num_kv_heads=heads.query, n_embd=heads.query * heads.size)
        theirs = [deepspeed.fused(Named("GPTBigCodeBlock"), whole, ranks, rank, meta) for rank in range(ranks)]
        assert same(parts_of(whole, fused_rows(heads, ranks, "blocks", spare="replicate")), theirs)


def test_shared_query_and_key_heads() -> None:
    for ranks in range(1, 6):
        for pairs in range(1, 6):
            heads = Heads(query=2 * ranks * pairs, kv=2 * ranks * pairs, size=1)
            held = [[row for part in own for row in part] for own in shared_qk_rows(heads, ranks)]
            assert held == [deepspeed.shared(heads.query, ranks, rank) for rank in range(ranks)]


def heads_for(name: str, source: random.Random) -> tuple[Heads, int]:
    while True:
        ranks, kv = source.randint(2, 5), source.randint(1, 12)
        group = 1 if name == "odd-shared-heads" else source.randint(1, 6)
        heads = Heads(query=kv * group, kv=kv, size=source.randint(1, 6))
        if DEVIATIONS[name].needs(heads, ranks) and not (name == "grouped-thirds" and kv == 2):
            return heads, ranks


def expected(name: str, heads: Heads, ranks: int, whole: Tensor) -> list[Tensor]:
    """Parts that the deviation cuts; its laws are broken."""
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
