"""Slices that are drawn: heads and ranks, whole tensors of any bits, and a cut that is joined again."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from shardproof.parallel.communication.layout import Placement, meshgrid, shard
from shardproof.parallel.slicing.checkpoint import inverse, same_bits
from shardproof.parallel.slicing.rows import Heads

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.bool)


@st.composite
def heads_and_ranks(draw: st.DrawFn, /) -> tuple[Heads, int]:
    """At least one kv head for each rank."""
    ranks = draw(st.integers(1, 6))
    kv = draw(st.integers(ranks, ranks + 6))
    return Heads(query=kv * draw(st.integers(1, 4)), kv=kv, size=draw(st.integers(1, 5))), ranks


@st.composite
def few_heads_and_ranks(draw: st.DrawFn, /) -> tuple[Heads, int]:
    """Fewer kv heads than ranks."""
    ranks = draw(st.integers(2, 6))
    kv = draw(st.integers(1, ranks - 1))
    return Heads(query=kv * draw(st.integers(1, 6)), kv=kv, size=draw(st.integers(1, 5))), ranks


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits of this dtype, NaN and negative zeros of float dtypes included."""
    size = torch.empty(0, dtype=dtype).element_size()
    last = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, last, (*shape, size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def parts_of(whole: Tensor, place: Placement, ranks: int) -> list[Tensor]:
    return [shard(whole, place, at) for at in meshgrid({"tp": ranks})]


def check_round_trip(whole: Tensor, place: Placement, ranks: int) -> None:
    assert same_bits(inverse(parts_of(whole, place, ranks), place), whole)
