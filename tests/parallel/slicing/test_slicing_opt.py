"""Seed 004 by hand: what two ranks hold of an OPT layer, and that the sliced layer computes what the whole one does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from parallel.slicing.slices import Slice, slices
from parallel.slicing.strided import placed
from parallel.slicing.words import Sliced


def by_name(text: str) -> dict[str, Slice]:
    return {one.name: one for one in slices(Sliced.parse(text))}


def test_two_ranks_of_opt_125m() -> None:
    """The article's sizes: qkv_size_per_partition = 768 // 2 * 3 = 1152, out_size_per_partition = 384.

    Weights are [in, out].
    strided_copy cuts [q | k | v] into three blocks of 768 columns and each block into pieces of 1152 // 3 = 384: a rank
    holds piece i of each. copy takes rows of the row linears, whose biases [768] are whole.
    """
    found = by_name("family=opt hidden=768 heads=12 tp=2")
    q0, k0, v0 = range(0, 384), range(768, 1152), range(1536, 1920)
    q1, k1, v1 = range(384, 768), range(1152, 1536), range(1920, 2304)
    held = {
        "attn_qkvw": ((768, 2304), 1, ((q0, k0, v0), (q1, k1, v1))),
        "attn_qkvb": ((2304,), 0, ((q0, k0, v0), (q1, k1, v1))),
        "attn_ow": ((768, 768), 0, ((range(0, 384),), (range(384, 768),))),
        "attn_ob": ((768,), 0, ()),
        "inter_w": ((768, 3072), 1, ((range(0, 1536),), (range(1536, 3072),))),
        "inter_b": ((3072,), 0, ((range(0, 1536),), (range(1536, 3072),))),
        "output_w": ((3072, 768), 0, ((range(0, 1536),), (range(1536, 3072),))),
        "output_b": ((768,), 0, ()),
    }
    assert list(found)[:8] == list(held)
    for name, (shape, dim, ranges) in held.items():
        place = found[name].place
        assert (place.shape, [(cut.axis, cut.dim, cut.held) for cut in place.cuts]) == (
            shape,
            [("tp", dim, ranges)] if ranges else [],
        ), name
    shapes = {
        name: [tuple(part.shape) for part in cut(torch.zeros(one.place.shape), one, 2)] for name, one in found.items()
    }
    assert shapes["attn_qkvw"] == [(768, 1152)] * 2 and shapes["attn_qkvb"] == [(1152,)] * 2
    assert shapes["attn_ow"] == [(384, 768)] * 2 and shapes["attn_ob"] == [(768,)] * 2
    assert shapes["inter_w"] == [(768, 1536)] * 2 and shapes["inter_b"] == [(1536,)] * 2
    assert shapes["output_w"] == [(1536, 768)] * 2 and shapes["output_b"] == [(768,)] * 2
    assert shapes["lm_head.weight"] == [(50272, 384)] * 2
    assert {name for name, one in found.items() if not one.place.cuts} >= {
        "self_attn_layer_norm.weight",
        "final_layer_norm.bias",
        "model.decoder.embed_tokens.weight",
        "model.decoder.embed_positions.weight",
    }
    assert found["model.decoder.embed_positions.weight"].place.shape == (2050, 768)
    assert found["attn_qkvw"].sources == tuple(f"self_attn.{part}_proj.weight" for part in "qkv")


def cut(whole: Tensor, one: Slice, ranks: int) -> list[Tensor]:
    found = [placed(whole, one.place, rank=rank, ranks=ranks) for rank in range(ranks)]
    return [part for part in found if part is not None]


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attended(fused: Tensor, kv: int, group: int, size: int) -> Tensor:
    """Causal attention of [S, (q heads, k heads, v heads) * size], [S, q heads * size]."""
    q, k, v = (
        part.unflatten(-1, (-1, size)).transpose(0, 1)
        for part in fused.split([kv * group * size, kv * size, kv * size], -1)
    )
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


def layer(x: Tensor, tensors: dict[str, Tensor], kv: int, group: int, size: int) -> tuple[Tensor, Tensor]:
    """Attention and MLP of this rank's tensors, before their sums over the ranks and their biases."""
    fused = x @ tensors["attn_qkvw"] + tensors["attn_qkvb"]
    inner = functional.relu(x @ tensors["inter_w"] + tensors["inter_b"])
    return attended(fused, kv, group, size) @ tensors["attn_ow"], inner @ tensors["output_w"]


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
@pytest.mark.parametrize("kv_heads", [12, 6])
def test_the_sliced_layer_computes_what_the_whole_one_does(tp: int, kv_heads: int) -> None:
    """Outputs of row linears are summed over the ranks, and their whole biases added once, after the sum."""
    model = Sliced.parse(f"family=opt hidden=48 heads=12 kv_heads={kv_heads} ffn=60 vocab=30 tp={tp}")
    made = {one.name: one for one in slices(model)}
    whole = {name: numbers(one.place.shape, seed) for seed, (name, one) in enumerate(made.items())}
    x = numbers((5, 48), 99)
    right = layer(x, whole, kv_heads, 12 // kv_heads, 4)
    parts = {name: cut(whole[name], one, tp) for name, one in made.items()}
    sums = [torch.zeros_like(x), torch.zeros_like(x)]
    for rank in range(tp):
        own = {name: found[rank] for name, found in parts.items()}
        for place, partial in enumerate(layer(x, own, kv_heads // tp, 12 // kv_heads, 4)):
            sums[place] += partial
    for total, expected, bias in zip(sums, right, ("attn_ob", "output_b"), strict=True):
        assert parts[bias][0].shape == (48,)
        torch.testing.assert_close(total + parts[bias][0], expected + whole[bias], rtol=1e-12, atol=1e-12)
    logits = sum(x[:, span[0].start : span[0].stop] @ part.t() for span, part in heads_of(made, parts, tp))
    torch.testing.assert_close(logits, x @ whole["lm_head.weight"].t(), rtol=1e-12, atol=1e-12)


def heads_of(made: dict[str, Slice], parts: dict[str, list[Tensor]], tp: int) -> list[tuple[tuple[range, ...], Tensor]]:
    """Of every rank, the input features that its columns of the head take."""
    held = made["lm_head.weight"].place.cuts[0].held
    assert len(held) == tp
    return list(zip(held, parts["lm_head.weight"], strict=True))


@pytest.mark.parametrize(
    ("tp", "words", "key"), [(5, "", "heads"), (4, "kv_heads=6", "kv_heads"), (4, "ffn=62", "ffn")]
)
def test_a_container_that_would_lose_heads_or_features_is_refused(tp: int, words: str, key: str) -> None:
    """DeepSpeed's // would drop them, or give a rank half a head."""
    with pytest.raises(ValueError, match=rf"^{key}=\d+: must be a multiple of tp={tp}: a container gives every rank"):
        by_name(f"family=opt hidden=48 heads=12 tp={tp} {words}")
