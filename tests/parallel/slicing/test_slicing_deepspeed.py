"""Tests of slicing/rows. DeepSpeed's own functions cut as ours wherever they are right; where they are wrong, their cut
breaks a law.

Inputs are drawn from a seed. Rows are numbered, so that equal results mean the same rows in the same order.
"""

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from shardproof.parallel.communication.layout import Cut, Placement
from shardproof.parallel.slicing.rows import (
    Heads,
    RowRanges,
    consecutive,
    even_shares,
    fused_rows,
    shard_sizes,
    shared_qk_rows,
)
from shardproof.parallel.slicing.slices import equal_pieces
from shardproof.reference.errors import CaseError
from tests.parallel.slicing.deepspeed_copies import Named, copied, deepspeed, numbered, same
from tests.parallel.slicing.laws import of_heads, parts_of

pytestmark = pytest.mark.peers
DRAWS = 200
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
BLOCKS = ("GLMBlock", "MPTBlock", "MptBlock", "BaichuanLayer", "QWenBlock", "SomeDecoderLayer")
GROUPS = ("BloomBlock", "FalconDecoderLayer", "GPTNeoXLayer")


def held_parts(whole: Tensor, held: RowRanges) -> list[Tensor]:
    return parts_of(whole, Placement(shape=tuple(whole.shape), cuts=(Cut(axis="tp", held=held),)), len(held))


@pytest.mark.parametrize("cut", ["strided", "strided bias", "outputs", "inputs", "bias"])
@pytest.mark.parametrize("orientation", ["in-out", "out-in"])
def test_copies(orientation: str, cut: str) -> None:
    source, in_pieces = random.Random(f"{orientation} {cut}"), "strided" in cut
    for _ in range(DRAWS):
        ranks, splits = source.randint(2, 5), source.randint(1, 4) if in_pieces else 1
        long, other = ranks * splits * source.randint(1, 4), source.randint(1, 5)
        dim = 0 if "bias" in cut else int((orientation == "in-out") == (cut != "inputs"))
        src = (long,) if "bias" in cut else (other, long) if dim else (long, other)
        dst = tuple(size // ranks if at == dim else size for at, size in enumerate(src))
        whole = numbered(src, source.choice(DTYPES))
        words: dict[str, Any] = {"allocate_tensor": source.random() < 0.5}
        place = equal_pieces(src, dim, (long // splits,) * splits, ranks)
        words |= {"num_splits": splits} if in_pieces else {}
        call = "strided_copy" if in_pieces else "copy"
        theirs = copied(call, whole, dst, ranks, orientation, **words)
        assert same(parts_of(whole, place, ranks), theirs), (src, dst, ranks, splits)


@pytest.mark.parametrize("call", ["strided_copy", "copy"])
def test_what_is_whole_is_whole_and_a_merge_is_refused(call: str) -> None:
    words = {"num_splits": 3} if call == "strided_copy" else {}
    for src in ((4, 6), (6,)):
        whole = numbered(src)
        assert same([whole, whole], copied(call, whole, src, 2, "in-out", **words))
    replace = deepspeed().slicing(mp_size=2)
    assert getattr(replace, call)(torch.empty(4, 6), None, **words) is None
    with pytest.raises(AssertionError, match="Merging tensors is not allowed"):
        copied(call, numbered((4, 6)), (4, 9), 2, "in-out", **words)


def test_sizes() -> None:
    source = random.Random("sizes")
    names = ("", "fc1", "self_attn.q_proj", "mlp.down_proj", "lm_head", "embed_out", "block.w2", "mlp.dense_h_to_4h")
    for _ in range(2 * DRAWS):
        total, ranks, grain = source.randint(1, 300), source.randint(1, 9), source.choice((1, 1, 2, 16, 64))
        kv_heads, name = source.choice((None, source.randint(1, 16))), source.choice(names)
        meta = deepspeed().meta(num_kv_heads=kv_heads, tp_grain_size=grain)
        theirs = deepspeed().sizes(total, ranks, meta, name or None)
        assert shard_sizes(total, ranks, kv_heads=kv_heads, grain=grain, name=name) == tuple(theirs)


def fused(name: str, heads: Heads, ranks: int, whole: Tensor, **words: int) -> list[Tensor]:
    """A fused weight of a layer on every rank; `words` are those of the meta beside the sizes of all layers."""
    meta = deepspeed().meta(num_attention_heads=heads.query, n_embd=heads.query * heads.size, **words)
    return [deepspeed().fused(Named(name), whole, ranks, rank, meta) for rank in range(ranks)]


def drawn_heads(source: random.Random, name: str) -> tuple[Heads, int]:
    """Blocks have as many key as query heads, or two; groups and Phi-3 any; CodeGen fours a rank, BigCode one."""
    ranks, each, size = source.randint(2, 5), source.randint(1, 4), source.randint(1, 4)
    if name == "CodeGenBlock":
        return Heads(query=4 * ranks * each, kv=4 * ranks * each, size=size), ranks
    if name == "GPTBigCodeBlock":
        return Heads(query=ranks * each, kv=1, size=size), ranks
    if name not in GROUPS and source.random() < 0.3:
        return Heads(query=2 * source.randint(1, 5), kv=2, size=size), 2
    kv = source.randint(ranks, ranks + 6)
    return Heads(query=kv if name in BLOCKS else kv * each, kv=kv, size=size), ranks


@pytest.mark.parametrize("name", [*BLOCKS, *GROUPS, "Phi3DecoderLayer", "CodeGenBlock", "GPTBigCodeBlock"])
def test_fused_weights(name: str) -> None:
    """BigCode: the kv head is whole on every rank; queries are shared evenly when the meta counts query heads."""
    source, one_for_all = random.Random(name), name == "GPTBigCodeBlock"
    order = "groups" if name in GROUPS else "codegen" if name == "CodeGenBlock" else "blocks"
    for _ in range(DRAWS // 2):
        heads, ranks = drawn_heads(source, name)
        columns = heads.query * heads.size if name.startswith("Phi3") else 2
        bias = name in (*BLOCKS, *GROUPS) and source.random() < 0.3
        whole = numbered((heads.fused,) if bias else (heads.fused, columns))
        theirs = fused(name, heads, ranks, whole, num_kv_heads=heads.query if one_for_all else heads.kv)
        ours = fused_rows(heads, ranks, order, spare="replicate" if one_for_all else "refuse")
        assert same(held_parts(whole, ours), theirs), (heads, ranks)


def test_codegen_needs_fours_of_heads() -> None:
    heads = Heads(query=4, kv=4, size=1)
    with pytest.raises(AssertionError, match="num_kv_heads"):
        fused("CodeGenBlock", heads, 2, numbered((12, 2)), num_kv_heads=4)
    with pytest.raises(CaseError, match="multiple of the 4 blocks of CodeGen"):
        fused_rows(heads, 2, "codegen")


def test_shared_query_and_key_heads() -> None:
    for ranks in range(1, 6):
        for pairs in range(1, 6):
            heads = Heads(query=2 * ranks * pairs, kv=2 * ranks * pairs, size=1)
            held = [[row for part in own for row in part] for own in shared_qk_rows(heads, ranks)]
            assert held == [deepspeed().shared(heads.query, ranks, rank) for rank in range(ranks)]


def held_as(parts: list[Tensor]) -> RowRanges:
    """The rows of a numbered weight of one or two columns that these parts are."""
    columns = 1 if parts[0].dim() == 1 else parts[0].shape[1]
    firsts = [(part if part.dim() == 1 else part[:, 0]).long() // columns for part in parts]
    return tuple(tuple(range(row, row + 1) for row in own.tolist()) for own in firsts)


def thirds(heads: Heads, ranks: int) -> RowRanges:
    whole = numbered((heads.fused, 2))
    return held_as(copied("strided_copy", whole, (heads.fused // ranks, 2), ranks, "out-in", num_splits=3))


def fused_as(name: str) -> Callable[[Heads, int], RowRanges]:
    """A fused weight of a layer that states no number of kv heads; one that does may move the cuts, as wrongly."""
    return lambda heads, ranks: held_as(fused(name, heads, ranks, numbered((heads.fused, 2))))


glm = fused_as("GLMBlock")


def buffers(heads: Heads, ranks: int) -> RowRanges:
    """The sizes of DeepSpeedSelfAttention's buffers, its kernels left out."""
    hidden = heads.query * heads.size
    config = deepspeed().config(
        hidden_size=hidden, heads=heads.query, num_kv=heads.kv, mp_size=ranks, dtype=torch.float32
    )
    made = deepspeed().attention(config)
    assert made.attn_qkvw.shape[1] == made.attn_qkvb.shape[0] and made.attn_ow.shape == (hidden // ranks, hidden)
    return consecutive([made.attn_qkvw.shape[1]] * ranks)


def halves(heads: Heads, ranks: int) -> RowRanges:
    """Query, key and value copied by themselves into equal buffers, as HybridSplitQKVContainer does."""
    query, kv = heads.query * heads.size, heads.kv * heads.size
    pieces = [
        copied("copy", own, (len(own) // ranks, 2), ranks, "out-in")
        for own in numbered((heads.fused, 2)).split([query, kv, kv])
    ]
    return held_as([torch.cat(own) for own in zip(*pieces, strict=True)])


def remainder(heads: Heads, ranks: int) -> RowRanges:
    shape = (heads.fused // ranks,)
    with pytest.raises(CaseError, match="must each be a multiple of ranks"):
        equal_pieces((heads.fused,), 0, (heads.fused,), ranks)
    return held_as(copied("copy", numbered((heads.fused,)), shape, ranks, "in-out"))


def by_features(heads: Heads, ranks: int) -> RowRanges:
    """`get_shard_size` looks for "w1" in the name; ours for its last part."""
    rows, meta = heads.query * heads.size, deepspeed().meta(num_kv_heads=heads.kv)
    right = consecutive(shard_sizes(rows, ranks, kv_heads=heads.kv, name="self_attn.w1proj"))
    assert of_heads(right, heads, "") == []
    return consecutive(deepspeed().sizes(rows, ranks, meta, "self_attn.w1proj"))


def shared(heads: Heads, ranks: int) -> RowRanges:
    own = [deepspeed().shared(heads.query, ranks, rank) for rank in range(ranks)]
    return tuple(tuple(range(h * heads.size, (h + 1) * heads.size) for h in heads_of) for heads_of in own)


def whole_thirds(h: Heads, n: int) -> bool:
    return h.fused % (3 * n) == 0


WRONG: dict[str, tuple[Callable[[Heads, int], RowRanges], str, Callable[[Heads, int], bool]]] = {
    "grouped-thirds": (thirds, "blocks", lambda h, n: h.kv < h.query and whole_thirds(h, n)),
    "grouped-thirds by glmtype": (glm, "blocks", lambda h, n: 2 != h.kv < h.query and whole_thirds(h, n)),
    "decoder-layer-thirds": (fused_as("PersimmonDecoderLayer"), "groups", whole_thirds),
    "container-size": (buffers, "blocks", lambda h, n: h.query % n == 0 and (h.query + 2 * h.kv) % n > 0),
    "half-heads": (halves, "blocks", lambda h, n: h.query % n == 0 and h.kv % n > 0 and h.kv * h.size % n == 0),
    "dropped-remainder": (remainder, "groups", lambda h, n: h.fused % n > 0 and h.fused > n),
    "queries-by-features": (by_features, "", lambda h, n: any(s % h.size for s in even_shares(h.query * h.size, n))),
    "odd-shared-heads": (shared, "", lambda h, n: h.query % (2 * n) == n and h.query % 2 == 0),
}
"""Name in docs/splitting.md -> what DeepSpeed cuts, the weight's order ("": of queries alone), where it is wrong."""


@pytest.mark.parametrize("name", WRONG)
def test_what_it_cuts_wrongly_breaks_a_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed().op, "inference_module", MagicMock())
    monkeypatch.setattr(deepspeed().attention, "num_layers", 0)
    cut, order, is_wrong = WRONG[name]
    source, seen = random.Random(name), 0
    while seen < 20:
        ranks, kv = source.randint(2, 5), source.randint(1, 12)
        group = 1 if name == "odd-shared-heads" else source.randint(1, 6)
        heads = Heads(query=kv * group, kv=kv, size=source.randint(1, 6))
        if is_wrong(heads, ranks):
            assert of_heads(cut(heads, ranks), heads, order), (heads, ranks)
            seen += 1


def test_whole_scales() -> None:
    """The scale is attached whole, however many blocks of rows it has; those of a rank are its own rows'."""
    weight = numbered((12, 4), torch.int8)
    weight.scale = torch.arange(12.0)[:, None]  # type: ignore[attr-defined]
    replace = deepspeed().slicing(mp_size=2, out_dim=0, in_dim=1)
    replace.gpu_index = 1
    part = replace.strided_copy(torch.empty(6, 4, dtype=torch.int8), weight, num_splits=3, int8=True)
    assert part.scale is weight.scale and (part[:, 0] // 4).tolist() == [2, 3, 6, 7, 10, 11]  # type: ignore[attr-defined]
