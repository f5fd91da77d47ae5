"""Shards of rows as torch.chunk cuts them, and units as fully_shard pads them."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.data_parallel.rows import Unit, padded_rows, rows_of

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@given(st.integers(0, 30), st.integers(1, 9))
def test_rows_are_cut_as_torch_chunk_cuts_them(rows: int, ranks: int) -> None:
    held = [[*rows_of(rows, rank, ranks)] for rank in range(ranks)]
    theirs = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks)] if rows else []
    assert [rows_held for rows_held in held if rows_held] == [chunk for chunk in theirs if chunk]
    assert sum(held, []) == [*range(rows)]
    assert all(len(rows_held) <= padded_rows(rows, ranks) for rows_held in held)


def test_the_units_of_around_15() -> None:
    block = Unit(shapes={"0.weight": (5, 6), "0.bias": (5,), "1.weight": (6, 5)}, ranks=4)
    root = Unit(shapes={"embedding.weight": (7, 6), "norm.weight": (6,), "norm.bias": (6,)}, ranks=4)
    assert (block.elements, root.elements) == (96, 64)
    assert [block.shard_shape("0.weight", rank) for rank in range(4)] == [(2, 6), (2, 6), (1, 6), (0, 6)]


@given(st.lists(SHAPES.filter(bool), min_size=1, max_size=4), st.integers(1, 6))
def test_a_unit_holds_every_padded_shard_end_to_end(shapes: list[tuple[int, ...]], ranks: int) -> None:
    unit = Unit(shapes={str(number): shape for number, shape in enumerate(shapes)}, ranks=ranks)
    places = [*unit.places()]
    assert [first for _, first, _ in places] == [sum(size for _, _, size in places[:n]) for n in range(len(places))]
    assert sum(size for _, _, size in places) * ranks == unit.elements
    for name, _, size in places:
        held = [math.prod(unit.shard_shape(name, rank)) for rank in range(ranks)]
        assert sum(held) == math.prod(unit.shapes[name])
        assert max(held) == held[0] == size
