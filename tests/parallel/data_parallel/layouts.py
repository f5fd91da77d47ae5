"""Drawn models for the laws of buckets: parameters of many sizes in order of registration."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st


class Layout(NamedTuple):
    """What a buffer is laid out from."""

    sizes: dict[str, int]
    ranks: int
    sharded: bool
    largest: int
    apart: frozenset[str]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any: up to nine parameters of unequal sizes, buckets from smaller than one of them to larger than all."""
    sizes = draw(st.lists(st.integers(1, 1500), min_size=1, max_size=9))
    named = {f"p{number}": size for number, size in enumerate(sizes)}
    return Layout(
        sizes=named,
        ranks=draw(st.sampled_from([1, 2, 3, 5, 7, 8])),
        sharded=draw(st.booleans()),
        largest=draw(st.sampled_from([0, 1, 64, 700, 2000, 20_000])),
        apart=frozenset(draw(st.sets(st.sampled_from(list(named)), max_size=2))),
    )
