"""Buckets of flat buffers, shards of rows and loss scales: every element once, ranges that tile, unowned padding."""

import importlib
import itertools
import math
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.data_parallel.buckets import ALIGNMENT, DIVISOR, bucketed, shares
from parallel.data_parallel.rows import Unit, padded_rows, rows_of
from parallel.model.loss_scale import DynamicScale


class Layout(NamedTuple):
    """Parameters of a buffer's layout."""

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


def test_the_example_of_around_15() -> None:
    sizes = {"shared": 1000, "a": 100, "b": 64, "c": 300, "d": 7}
    found = bucketed(sizes, ranks=3, sharded=True, apart={"shared"})
    assert [(bucket.start, bucket.end) for bucket in found] == [(0, 768), (768, 1920)]
    assert [[slot.name for slot in bucket.slots] for bucket in found] == [["d", "c", "b", "a"], ["shared"]]
    (plain,) = bucketed(sizes, ranks=3, sharded=False, apart={"shared"})
    assert (plain.start, plain.end) == (0, sum(sizes.values()))


@given(layouts())
def test_every_element_lies_in_one_bucket_and_buckets_tile_the_buffer(layout: Layout) -> None:
    found = bucketed(**layout._asdict())
    slots = [slot for bucket in found for slot in bucket.slots]
    assert {slot.name: slot.end - slot.start for slot in slots} == layout.sizes
    assert [slot.name for slot in slots] == list(reversed(layout.sizes))
    assert [bucket.start for bucket in found] == [0, *[bucket.end for bucket in found[:-1]]]
    assert all(one.end <= other.start for one, other in itertools.pairwise(slots))
    for bucket in found:
        assert bucket.start <= bucket.slots[0].start
        assert bucket.slots[-1].end <= bucket.end
        if layout.sharded:
            assert not [slot for slot in bucket.slots if slot.start % ALIGNMENT]
            assert bucket.size % layout.ranks == bucket.size % DIVISOR == 0
        else:
            assert bucket.size == sum(slot.end - slot.start for slot in bucket.slots)


@given(layouts())
def test_a_bucket_is_closed_as_soon_as_it_is_full(layout: Layout) -> None:
    for bucket in bucketed(**layout._asdict()):
        if layout.largest:
            assert all(slot.end - bucket.start < layout.largest for slot in bucket.slots[:-1])
        if layout.sharded:
            assert len(bucket.slots) == 1 or not {slot.name for slot in bucket.slots} & layout.apart


@given(layouts())
def test_the_shares_of_all_ranks_tile_every_parameter(layout: Layout) -> None:
    covered: dict[str, list[tuple[int, int]]] = {name: [] for name in layout.sizes}
    for bucket in bucketed(**{**layout._asdict(), "sharded": True}):
        width = bucket.size // layout.ranks
        owned = [bucket.owned(rank, layout.ranks) for rank in range(layout.ranks)]
        assert [*itertools.chain.from_iterable(owned)] == [*range(bucket.start, bucket.end)]
        for rank in range(layout.ranks):
            for share in shares(bucket, rank, layout.ranks):
                assert 0 <= share.at <= share.at + share.last - share.first <= width
                covered[share.name].append((share.first, share.last))
    for name, size in layout.sizes.items():
        ends = sorted(covered[name])
        assert [first for first, _ in ends] == [0, *[last for _, last in ends[:-1]]]
        assert ends[-1][1] == size


def test_a_bucket_that_is_not_padded_has_no_equal_parts() -> None:
    (bucket,) = bucketed({"a": 7}, ranks=2, sharded=False)
    with pytest.raises(ValueError, match="ranks=2: must divide the 7 elements"):
        bucket.owned(0, 2)


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


def scales(rule: DynamicScale, steps: Iterable[bool]) -> tuple[float, ...]:
    """The scale of every step and of the one after the last, from whether each was infinite."""
    states = accumulate(steps, lambda state, infinite: rule.after(state, infinite=infinite), initial=rule.start())
    return tuple(state.value for state in states)


def test_the_log_of_the_seed() -> None:
    """20 of 200 steps are skipped from 2**32 on: the first only uses up patience, 19 halve, and the log says 8192."""
    assert scales(DynamicScale(), [True] * 20 + [False] * 180)[-1] == 8192.0


def test_a_finite_step_alone_does_not_restore_hysteresis() -> None:
    rule = DynamicScale(first=1024.0, interval=3)
    assert scales(rule, [True, False, True]) == (1024.0, 1024.0, 1024.0, 512.0)
    grown = scales(rule, [True, False, False, False, True, True])
    assert grown == (1024.0, 1024.0, 1024.0, 1024.0, 2048.0, 2048.0, 1024.0)


def test_the_scale_stays_above_the_least() -> None:
    assert scales(DynamicScale(first=4.0, least=2.0, hysteresis=1), [True] * 3)[-1] == 2.0


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@given(
    st.lists(st.booleans(), max_size=40),
    st.fixed_dictionaries({"interval": st.integers(1, 4), "hysteresis": st.integers(1, 3)}),
)
def test_megatrons_own_scaler_agrees(steps: list[bool], words: dict[str, int]) -> None:
    theirs = importlib.import_module("megatron.core.optimizer.grad_scaler")
    rule = DynamicScale(first=2.0**16, least=2.0, **words)
    made = torch.tensor

    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        return made(*args, **{**kwargs, "device": "cpu"})

    with patch.object(theirs.torch, "tensor", on_cpu):
        scaler = theirs.DynamicGradScaler(
            initial_scale=rule.first,
            min_scale=rule.least,
            growth_factor=rule.growth_factor,
            backoff_factor=rule.backoff_factor,
            growth_interval=rule.interval,
            hysteresis=rule.hysteresis,
        )
    found = [scaler.scale.item()]
    for infinite in steps:
        scaler.update(infinite)
        found.append(scaler.scale.item())
    assert scales(rule, steps) == tuple(found)
