"""The seven properties of rank groups over drawn meshes, and each seen to fail on a generator with a bug."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import combinations, permutations
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from reference.groups import Groups, Layout, RankOrder
from tests.reference.groups import systems
from tests.reference.groups.layouts import layouts, rank_orders
from tests.reference.groups.systems import megatron

Law = Callable[[Layout], None]


def tokens(order: RankOrder) -> list[tuple[str, ...]]:
    axes = list(order.sizes)
    return [some for count in range(1, len(axes) + 1) for some in combinations(axes, count)]


def groups_partition_the_world(layout: Layout) -> None:
    for order in layout.orders:
        for words in tokens(order):
            groups = order.groups("-".join(words))
            assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
            assert all(group == tuple(sorted(group)) for group in groups) and list(groups) == sorted(groups)


def complements_meet_in_one_rank(layout: Layout) -> None:
    for order in layout.orders:
        axes = list(order.sizes)
        for words in tokens(order)[:-1]:
            others = [axis for axis in axes if axis not in words]
            for group in order.groups("-".join(words)):
                assert all(len({*group} & {*other}) == 1 for other in order.groups("-".join(others)))
        for rank in range(layout.world):
            rest = (order.group("-".join(a for a in axes if a != axis), rank) for axis in axes)
            assert set.intersection(*map(set, rest)) == {rank}


def words_may_be_permuted(layout: Layout) -> None:
    for order in layout.orders:
        for words in tokens(order):
            assert len({order.groups("-".join(turned)) for turned in permutations(words)}) == 1


def coordinates_lead_back(layout: Layout) -> None:
    for order in layout.orders:
        seen = [order.coordinates(rank) for rank in range(layout.world)]
        assert [order.rank(places) for places in seen] == list(range(layout.world))
        for axis in order.sizes:
            for rank in range(layout.world):
                assert order.group(axis, rank)[seen[rank][axis]] == rank


def pipelines_of_experts_are_the_dense_ones(layout: Layout) -> None:
    dense, expert = layout.orders
    assert dense.groups("pp") == expert.groups("pp")


def experts_fill_a_stage(layout: Layout) -> None:
    dense, expert = layout.orders
    assert {*map(frozenset, dense.groups("tp-cp-dp"))} == {*map(frozenset, expert.groups("etp-ep-edp"))}


def an_axis_is_known_by_its_size(layout: Layout) -> None:
    for order in layout.orders:
        for words in tokens(order):
            size = math.prod(order.sizes[word] for word in words)
            assert {len(group) for group in order.groups("-".join(words))} == {size}


def with_bug(method: str, bug: Callable[..., object]) -> Callable[[], AbstractContextManager[object]]:
    """The generator with one method replaced by what `bug` makes of it."""
    right = getattr(RankOrder, method)
    return lambda: patch.object(RankOrder, method, lambda self, *given: bug(right, self, *given))


def _strided_twice(right: Callable[..., Groups], order: RankOrder, axes: str) -> Groups:
    """TE #2179: members counted as if there were one group."""
    groups = right(order, axes)
    return tuple(groups[0] for _ in groups)


def _next_group(right: Callable[..., tuple[int, ...]], order: RankOrder, axes: str, rank: int) -> tuple[int, ...]:
    return right(order, axes, (rank + 1) % order.world)


def _in_order_of_words(right: Callable[..., Groups], order: RankOrder, axes: str) -> Groups:
    """Members in the order of the token's words, not in that of the order string."""
    words = axes.split("-")
    return tuple(
        tuple(sorted(group, key=lambda rank: [order.place(word, rank) for word in reversed(words)]))
        for group in right(order, axes)
    )


def _slowest_first(_right: Callable[..., dict[str, int]], order: RankOrder, rank: int) -> dict[str, int]:
    places = {}
    for axis, size in reversed(order.axes):
        places[axis], rank = rank % size, rank // size
    return places


def _exchanged(right: Callable[..., Groups], order: RankOrder, axes: str) -> Groups:
    """B-66: the data group where the context group is meant, and the reverse."""
    other = {"dp": "cp", "cp": "dp"} if {"dp", "cp"} <= {*order.sizes} else {}
    return right(order, "-".join(other.get(word, word) for word in axes.split("-")))


def _any_order() -> AbstractContextManager[object]:
    """Megatron's two guards left out."""
    return patch.object(systems, "_check_pipelines")


LAWS: dict[Law, Callable[[], AbstractContextManager[object]]] = {
    groups_partition_the_world: with_bug("groups", _strided_twice),
    complements_meet_in_one_rank: with_bug("group", _next_group),
    words_may_be_permuted: with_bug("groups", _in_order_of_words),
    coordinates_lead_back: with_bug("coordinates", _slowest_first),
    pipelines_of_experts_are_the_dense_ones: _any_order,
    experts_fill_a_stage: _any_order,
    an_axis_is_known_by_its_size: with_bug("groups", _exchanged),
}
"""Each law with a bug that it must see."""

OF_EXPERTS = (pipelines_of_experts_are_the_dense_ones, experts_fill_a_stage)
QUICK = settings(
    max_examples=15,
    database=None,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.filter_too_much],
)


def hold(law: Law) -> None:
    """Check a law on drawn layouts."""
    any_order = rank_orders().map(lambda order: Layout(orders=(order,)))
    drawn = layouts() if law in OF_EXPERTS else any_order | layouts()
    QUICK(given(drawn)(law))()


@pytest.mark.parametrize("law", LAWS)
def test_the_law_holds(law: Law) -> None:
    hold(law)


@pytest.mark.parametrize("law", LAWS)
def test_the_law_sees_a_bug(law: Law) -> None:
    with LAWS[law](), pytest.raises(AssertionError):
        hold(law)


def test_equal_sizes_hide_an_exchanged_axis() -> None:
    """Why meshes are drawn with pairwise different sizes."""
    with LAWS[an_axis_is_known_by_its_size]():
        an_axis_is_known_by_its_size(megatron(world=8, cp=2, pp=2))
        with pytest.raises(AssertionError):
            an_axis_is_known_by_its_size(megatron(world=12, cp=2, pp=2))
