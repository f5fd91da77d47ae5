"""Wrong cuts of DeepSpeed 0.19.8, by name: each breaks a law of `tests.parallel.slicing.laws`, as tests see.

Nothing here is used by a slice of ours. `needs` says for which heads and ranks a deviation is wrong; outside of that it
cuts as the rule does. Sources: modes.md 8 and 10 (D1), experts.md 27 and 28 (X16); the functions named are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from parallel.communication.layout import Placement
from parallel.slicing.heads import Heads
from parallel.slicing.held import Held, beside, in_turn, in_units
from parallel.slicing.laws import inverse
from parallel.slicing.sizes import even_shares
from parallel.slicing.strided import placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A deviation of the cut of a query/key/value weight.

    order    of the fused weight that is cut; "" for the weight of the queries alone
    needs    whether it is wrong for these heads on that many ranks
    held     what the ranks then hold
    """

    deviation: str
    source: str
    order: str
    needs: Callable[[Heads, int], bool]
    held: Callable[[Heads, int], Held]


def _thirds(heads: Heads, ranks: int) -> Held:
    """Three equal blocks, a piece of each."""
    third = heads.fused // 3
    return beside(*(in_turn(even_shares(third, ranks), first=block * third) for block in range(3)))


def _whole_thirds(heads: Heads, ranks: int) -> bool:
    return heads.fused % (3 * ranks) == 0


def _pieces(heads: Heads, ranks: int) -> Held:
    """Equal pieces of the rows of q, of k and of v."""
    query, kv = heads.query * heads.size, heads.kv * heads.size
    parts = ((query, 0), (kv, query), (kv, query + kv))
    return beside(*(in_turn([length // ranks] * ranks, first=first) for length, first in parts))


def _container_size(heads: Heads, ranks: int) -> Held:
    """(heads + 2 kv_heads) // ranks heads on each rank."""
    return in_units(in_turn([(heads.query + 2 * heads.kv) // ranks] * ranks), heads.size)


def _dropped(heads: Heads, ranks: int) -> Held:
    return in_turn([heads.fused // ranks] * ranks)


def _by_features(heads: Heads, ranks: int) -> Held:
    return in_turn(even_shares(heads.query * heads.size, ranks))


def _odd_shared(heads: Heads, ranks: int) -> Held:
    own, half = heads.query // ranks, heads.query // 2
    firsts = [[(rank * own + step) // 2 for step in range(0, own, 2)] for rank in range(ranks)]
    units = tuple(tuple(range(h, h + 1) for h in (*first, *(head + half for head in first))) for first in firsts)
    return in_units(units, heads.size)


DEVIATIONS: dict[str, Deviation] = {
    "grouped-thirds": Deviation(
        deviation="[q; k; v] with fewer key than query heads is cut as three equal parts",
        source="D1: strided_copy(num_splits=3), maybe_copy_qkv; glmtype unless kv_heads is 2",
        order="blocks",
        needs=lambda heads, ranks: heads.kv < heads.query and ranks > 1 and _whole_thirds(heads, ranks),
        held=_thirds,
    ),
    "decoder-layer-thirds": Deviation(
        deviation="a weight whose rows lie head by head is cut as [q; k; v], for its layer is called *DecoderLayer",
        source="X16: get_fused_qkv_type falls back to glmtype (Persimmon, InternLM2)",
        order="groups",
        needs=lambda heads, ranks: ranks > 1 and _whole_thirds(heads, ranks),
        held=_thirds,
    ),
    "container-size": Deviation(
        deviation="every rank gets (heads + 2 kv_heads) // ranks heads, whatever is left over",
        source="X16: DeepSpeedSelfAttention qkv_size_per_partition with num_kv",
        order="blocks",
        needs=lambda heads, ranks: heads.query % ranks == 0 and (heads.query + 2 * heads.kv) % ranks > 0,
        held=_container_size,
    ),
    "half-heads": Deviation(
        deviation="key and value rows are cut evenly where the ranks do not divide the heads: half a head each",
        source="X16: qkv_size_per_partition with num_kv; glmtype with kv_heads=2 on more than 2 ranks",
        order="blocks",
        needs=lambda heads, ranks: (
            heads.query % ranks == 0 and heads.kv % ranks > 0 and heads.kv * heads.size % ranks == 0
        ),
        held=_pieces,
    ),
    "dropped-remainder": Deviation(
        deviation="what is left over when the ranks do not divide a dim lies on no rank",
        source="experts.md 27.1: copy of a bias, sizes by //",
        order="groups",
        needs=lambda heads, ranks: heads.fused % ranks > 0,
        held=_dropped,
    ),
    "queries-by-features": Deviation(
        deviation="queries are cut by features and not by heads, for their name contains w1, w2, w3 or mlp",
        source="experts.md 27.3: get_shard_size looks for substrings of the name",
        order="",
        needs=lambda heads, ranks: any(size % heads.size for size in even_shares(heads.query * heads.size, ranks)),
        held=_by_features,
    ),
    "odd-shared-heads": Deviation(
        deviation="with an odd number of heads on each rank, value heads lie on two ranks and others on none",
        source="experts.md 27.4: shared_qk_value_head_ids (Yuan)",
        order="",
        needs=lambda heads, ranks: ranks > 1 and heads.query % (2 * ranks) == ranks and heads.query % 2 == 0,
        held=_odd_shared,
    ),
}
"""Name -> the deviation."""


def whole_scales(_place: Placement, grid: tuple[int, ...]) -> Placement:
    """Scales left whole on every rank: right for one scale of the whole weight only (experts.md 27.1, 28 X16)."""
    return Placement(shape=grid)


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


def round_trip(whole: Tensor, place: Placement, ranks: int) -> Tensor:
    parts = [placed(whole, place, rank=rank, ranks=ranks) for rank in range(ranks)]
    return inverse([part for part in parts if part is not None], place)
