"""Buckets of flat buffers: every element once, ranges that tile, padding that belongs to nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given

from parallel.data_parallel.buckets import ALIGNMENT, DIVISOR, bucketed, shares
from tests.parallel.data_parallel.layouts import Layout, layouts


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
