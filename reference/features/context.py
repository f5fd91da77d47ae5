"""Context parallelism: each rank of the axis `cp` holds a slice of every row. Its words and what makes them legal.

Slices are equal: with zigzag the row length must be a multiple of 2*cp (Megatron-Core asserts this too), with
contiguous of cp. A mode that splits the sequence splits each slice once more. An exchange of tokens for heads needs
whole heads on every rank. Sources: around.md 12.2, 14, 18.1.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from shardproof.reference.language.core import Core
from shardproof.reference.language.groups import Layout
from shardproof.reference.language.words import Problem, multiple, not_default, word


class Context(Core):
    """A case with context ranks."""

    cp: int = word(
        1, "context-parallel ranks, each of which holds a slice of every row", domain=(1, 2, 4), after="dp", axis=20
    )
    cp_comm: str = word(
        "ring",
        "how attention meets the keys of other slices: they go round, are gathered, or tokens are exchanged for heads, "
        "alone or inside of a ring",
        legal=("ring", "gather", "alltoall", "alltoall-ring"),
    )
    cp_inner: int = word(
        1, "ranks of each exchange inside of the ring (cp_comm=alltoall-ring); divides cp", domain=(1, 2)
    )
    cp_slices: str = word(
        "zigzag",
        "a slice is one chunk of a row, or a chunk and its mirror (equal causal work)",
        legal=("zigzag", "contiguous"),
    )

    @property
    def is_sliced(self) -> bool:
        """Whether a row is split over several ranks."""
        return self.cp > 1

    @property
    def slices(self) -> tuple[tuple[range, ...], ...]:
        """The ranges of a row that each context rank holds: a chunk and its mirror image, or one chunk."""
        chunks = 2 * self.cp if self.cp_slices == "zigzag" else self.cp
        size = self.row_tokens // chunks
        runs = [range(first, first + size) for first in range(0, chunks * size, size)]
        return tuple((runs[rank], *((runs[-1 - rank],) if chunks > self.cp else ())) for rank in range(self.cp))

    @property
    def slice_tokens(self) -> int:
        """The number of tokens of a micro-batch on one context rank."""
        return self.tokens // self.cp

    @property
    def data_axis(self) -> str:
        """The data axis: `dp_cp` in place of `dp` with context ranks, since they see different tokens too."""
        axis = super().data_axis
        return self.token_axis if axis == "dp" else axis

    @property
    def token_axis(self) -> str:
        """The axis of ranks with different tokens: `dp_cp` with context ranks."""
        return "dp_cp" if self.cp > 1 else super().token_axis

    @property
    def layout(self) -> Layout:
        """The rank orders, with the joined axis `dp_cp`, and the two axes of an exchange inside of a ring."""
        layout, inner = super().layout, self.cp_inner
        if inner > 1:
            levels = layout.orders[0].divide("cp", cp_inner=inner, cp_outer=self.cp // inner)
            layout = replace(layout, orders=(*layout.orders, levels))
        return replace(layout, joined={**layout.joined, "dp_cp": "dp-cp"}) if self.cp > 1 else layout

    def problems(self) -> Iterator[Problem]:
        """Every broken rule: its word, the rule and a legal value."""
        cp, inner, mode = self.cp, self.cp_inner, self.system
        if cp == 1:
            for key, legal in not_default(Context, self):
                yield key, "is about context ranks, and cp=1 has one", legal
            return
        if mode.uneven:
            yield "cp", f"mode={self.mode} has no context parallelism", "cp=1"
        if self.metric:
            yield "metric", "is summed over tp alone, and context ranks hold other tokens", "metric=false"
        if self.shard:
            rule = f"shares parameters among data ranks, and with cp={cp} context ranks are among them"
            yield "shard", rule, "shard=0"
        unit = cp * (2 if self.cp_slices == "zigzag" else 1) * (self.tp if mode.sequence else 1)
        if self.row_tokens % unit:
            rule = f"mode={self.mode} with cp={cp} and cp_slices={self.cp_slices} cuts a row into {unit} equal parts"
            yield "seq", rule, f"seq={multiple(self.seq, unit)}"
        if self.cp_comm == "alltoall-ring" and (inner in (1, cp) or cp % inner):
            size = next((size for size in range(2, cp) if cp % size == 0), 0)
            rule = f"must divide cp={cp} and be neither 1 nor all of it"
            yield "cp_inner", rule, f"cp_inner={size}" if size else "cp=4 cp_inner=2"
        if self.cp_comm != "alltoall-ring" and inner != 1:
            yield "cp_inner", f"cp_comm={self.cp_comm} has one level", "cp_inner=1"
        if self.cp_comm in ("alltoall", "alltoall-ring"):
            yield from self._heads(inner if inner > 1 else cp)

    def _heads(self, ranks: int) -> Iterator[Problem]:
        """The broken rules of an exchange over this many ranks: each gets whole query heads and whole kv heads, which
        may be copies.
        """
        tp = self.tp
        if self.heads // tp % ranks:
            rule = f"the {self.heads // tp} of a rank must be a multiple of the {ranks} ranks that exchange them"
            yield "heads", rule, f"heads={math.lcm(tp * ranks, self.kv_heads)}"
        own = max(self.kv_heads, tp) // tp
        if own % ranks and ranks % own:
            rule = f"the {own} of a rank must divide the {ranks} ranks that exchange them, or be a multiple"
            yield "kv_heads", rule, f"kv_heads={tp}"
