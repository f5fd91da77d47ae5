"""Single layers of the reference against torch's own and against their defining properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from reference.model import layers

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_norms_equal_torch(scale: float) -> None:
    x, weight, bias = scale * noise(3, 5, 8), noise(8, seed=1), noise(8, seed=2)
    right = functional.layer_norm(x, (8,), weight, bias, eps=1e-5)
    torch.testing.assert_close(layers.norm(x, weight, bias), right, rtol=1e-12, atol=1e-12)
    right = functional.rms_norm(x, (8,), weight, eps=1e-5)
    torch.testing.assert_close(layers.norm(x, weight, None), right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rounds_once_at_its_end(dtype: torch.dtype) -> None:
    x, weight, bias = (noise(*shape, seed=3).to(dtype) for shape in ((4, 64), (64,), (64,)))
    found = layers.norm(x, weight, bias)
    right = layers.norm(x.double(), weight.double(), bias.double())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_attention_equals_torch_on_every_sentence(kv_heads: int, group: int, lengths: list[int], seed: int) -> None:
    total, heads, head_dim = sum(lengths), kv_heads * group, 4
    q = noise(1, total, heads, head_dim, seed=seed)
    k, v = noise(2, 1, total, kv_heads, head_dim, seed=seed + 1)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    found = layers.attention(q, k, v, layers.visible(total, cu_seqlens, torch.device("cpu")))
    pieces = [
        functional.scaled_dot_product_attention(
            q[:, start:end].transpose(1, 2),
            k[:, start:end].transpose(1, 2),
            v[:, start:end].transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
    ]
    right = torch.cat(pieces, dim=2).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_scores_are_scaled_and_normalised_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (8 * noise(1, 5, 1, 6, seed=seed).to(dtype) for seed in range(3))
    found = layers.attention(q, k, v, layers.visible(5, None, torch.device("cpu")))
    scores = (q[0, :, 0] @ k[0, :, 0].T).float() / math.sqrt(6)
    shares = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(-1)
    right = shares.to(dtype) @ v[0, :, 0]
    if dtype == torch.float32:  # a batched product may add in another order; the 16-bit types round that away
        torch.testing.assert_close(found[0], right, rtol=0, atol=8 * torch.finfo(dtype).eps * float(v.abs().max()))
    else:
        assert torch.equal(found[0], right)


def test_token_sees_itself_and_its_past_in_its_sentence_only() -> None:
    found = layers.visible(5, torch.tensor([0, 2, 5]), torch.device("cpu"))
    right = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert found.int().tolist() == right
    assert layers.visible(5, None, torch.device("cpu")).int().tolist() == torch.ones(5, 5).tril().tolist()


def test_rotation_turns_each_pair_by_its_angle() -> None:
    x = noise(1, 3, 2, 6)
    found = layers.rotate(x, torch.tensor([[0, 4, 900]]))
    torch.testing.assert_close(found[:, 0], x[:, 0])
    for pair in range(3):
        for token, position in ((1, 4), (2, 900)):
            angle = position / 10000 ** (2 * pair / 6)
            turned = torch.view_as_complex(x[0, token, :, [pair, pair + 3]].contiguous())
            turned = turned * complex(math.cos(angle), math.sin(angle))
            torch.testing.assert_close(found[0, token, :, [pair, pair + 3]], torch.view_as_real(turned))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotated_scores_depend_on_distance_only(dtype: torch.dtype) -> None:
    q, k = noise(1, 1, 1, 8).to(dtype), noise(1, 1, 1, 8, seed=1).to(dtype)

    def score(at_q: int, at_k: int) -> float:
        turned = [layers.rotate(x, torch.tensor([[at]])).double() for x, at in ((q, at_q), (k, at_k))]
        return float((turned[0] * turned[1]).sum())

    allowed = 100 * torch.finfo(dtype).eps
    assert abs(score(7, 3) - score(2007, 2003)) < allowed
    assert abs(score(7, 3) - score(3, 7)) > 1e-2


def test_split_of_a_fused_projection_follows_the_kv_groups() -> None:
    # two groups of three queries, one key, one value; head_dim 1, so that every number is a head
    q, k, v = layers.split_qkv(torch.arange(10)[None, None], heads=6, kv_heads=2)
    assert q[..., 0].tolist() == [[[0, 1, 2, 5, 6, 7]]]
    assert k[..., 0].tolist() == [[[3, 8]]]
    assert v[..., 0].tolist() == [[[4, 9]]]


def test_activations_equal_their_formulas() -> None:
    x, gate = noise(2, 3, 4), noise(2, 3, 4, seed=1)
    gelu = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(layers.activate("gelu", x), gelu)
    torch.testing.assert_close(layers.activate("relu", x), x.clamp(min=0))
    torch.testing.assert_close(layers.activate("swiglu", x, gate), gate / (1 + torch.exp(-gate)) * x)
