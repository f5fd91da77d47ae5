"""Laws of rank groups over drawn meshes; tables typed from documents of Megatron-Core and InternEvo."""

import math
from itertools import combinations, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.case import Case
from reference.groups import Groups, Layout, RankOrder
from suites.drawing.strategies import cases


@st.composite
def rank_orders(draw: st.DrawFn) -> Layout:
    """Four axes in any order, whose sizes differ pairwise, so that a group of the wrong axis has another size."""
    axes, sizes = draw(st.permutations(("tp", "cp", "ep", "dp"))), draw(st.permutations((1, 2, 3, 4)))
    return Layout(orders=(RankOrder.of("-".join(axes), dict(zip(axes, sizes, strict=True))),))


def tokens(order: RankOrder) -> list[tuple[str, ...]]:
    axes = list(order.sizes)
    return [some for count in range(1, len(axes) + 1) for some in combinations(axes, count)]


@settings(max_examples=15, deadline=None)
@given(rank_orders() | st.sampled_from(("tp", "isp")).flatmap(cases).map(lambda case: case.layout))
def test_groups_partition_the_world_and_meet_those_of_all_other_axes_in_one_rank(layout: Layout) -> None:
    """Their words may be permuted, their sizes are products, coordinates lead back to the rank."""
    for order in layout.orders:
        axes, seen = list(order.sizes), [order.coordinates(rank) for rank in range(layout.world)]
        assert len({tuple(places.items()) for places in seen}) == layout.world
        for words in tokens(order):
            groups, others = order.groups("-".join(words)), "-".join(axis for axis in axes if axis not in words)
            assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
            assert all(group == tuple(sorted(group)) for group in groups) and list(groups) == sorted(groups)
            assert {len(group) for group in groups} == {math.prod(order.sizes[word] for word in words)}
            assert len({order.groups("-".join(turned)) for turned in permutations(words)}) == 1
            for group in groups if others else ():
                assert all(len({*group} & {*other}) == 1 for other in order.groups(others))
        for axis, rank in product(axes, range(layout.world)):
            assert order.group(axis, rank)[seen[rank][axis]] == rank


TABLE = {
    "tp-cp-ep-dp-pp": "0,1 | 0,2 1,3 | 0,4 1,5 | 0,8 | 0,1,8,9 | 0,2,4,6",
    "tp-cp-ep-pp-dp": "0,1 | 0,2 1,3 | 0,8 1,9 | 0,4 | 0,1,4,5 | 0,2,8,10",
    "cp-tp-dp-pp": "0,2 1,3 | 0,1 2,3 | 0,4 1,5 | 0,8 | 0,2,8,10 | 0,1,4,5",
    "pp-dp-cp-tp": "0,8 | 0,4 | 0,2 | 0,1 | 0,1,8,9 | 0,2,4,6",
}
"""Megatron-Core 0.16.1, 16 ranks, tp2 cp2 dp2 pp2: the first groups along tp | cp | dp | pp | tp-pp | dp-cp."""

EXPERTS = {
    (1, 4): "0 | 0,1,2,3 4,5,6,7 | 0,4 1,5 | 0,1,2,3 | 0,1,2,3,8,9,10,11",
    (2, 2): "0,1 | 0,2 1,3 | 0,4 1,5 | 0,1,2,3",
    (2, 4): "0,1 | 0,2,4,6 1,3,5,7 | 0 | 0,1,2,3,4,5,6,7",
}
"""(etp, ep) beside tp2 pp2 dp4, order tp-cp-ep-dp-pp: along etp | ep | edp | etp-ep | etp-ep-pp."""

SIXTEEN = {
    "dp": "0,2 1,3 4,6 5,7 8,10 9,11 12,14 13,15",
    "tp": "0,1 2,3 4,5 6,7 8,9 10,11 12,13 14,15",
    "pp": "0,4,8,12 1,5,9,13 2,6,10,14 3,7,11,15",
    "tp-pp": "0,1,4,5,8,9,12,13 2,3,6,7,10,11,14,15",
}
"""Two machines, 16 devices, tp2 pp4 dp2: the docstring of initialize_model_parallel."""

EVO = {
    "wp": "0,1 2,3 4,5 6,7 8,9 10,11 12,13 14,15",
    "dp": "0,4 1,5 2,6 3,7 8,12 9,13 10,14 11,15",
    "pp": "0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15",
    "wdp": "0,2,4,6 1,3,5,7 8,10,12,14 9,11,13,15",
}
"""n=16 tp/sp=4 pp=2 dp=2 wp=2 wdp=4: the docstring of Initializer_Zero1_ISP."""


def read(text: str) -> Groups:
    return tuple(tuple(map(int, group.split(","))) for group in text.split())


@pytest.mark.parametrize("order", TABLE)
def test_a_case_has_the_groups_of_its_order(order: str) -> None:
    case = Case.parse(f"tp=2 cp=2 dp=2 pp=2 seq=16 order={order}")
    for axes, text in zip("tp cp dp pp tp-pp dp-cp".split(), TABLE[order].split("|"), strict=True):
        assert case.layout.groups(axes)[: len(read(text))] == read(text), axes
        own = case.axes.get("dp_cp" if axes == "dp-cp" else axes, read(text))
        assert own[: len(read(text))] == read(text), axes
    for axis in case.axis_sizes:
        assert all(case.axis_rank(axis, rank) == ranks.index(rank) for ranks in case.axes[axis] for rank in ranks)


@pytest.mark.parametrize(("etp", "ep"), EXPERTS)
def test_experts_on_sixteen_ranks(etp: int, ep: int) -> None:
    layout = Case.parse(f"mode=tp-sp tp=2 pp=2 dp=4 layers=2 experts=8 etp={etp} ep={ep}").layout
    for axes, text in zip("etp ep edp etp-ep etp-ep-pp".split(), EXPERTS[etp, ep].split("|"), strict=False):
        assert layout.groups(axes)[: len(read(text))] == read(text), axes


def test_an_order_numbers_experts_too() -> None:
    case = Case.parse("mode=tp-sp tp=2 dp=4 etp=2 ep=2 experts=8 order=dp-tp-ep")
    assert case.axes["tp"][0] == (0, 4) and case.axes["edp"][0] == (0, 1)
    assert case.axes["etp"][0] == (0, 2) and case.axes["ep"][0] == (0, 4)


@pytest.mark.parametrize(
    ("words", "table"), [("tp=2 pp=4 dp=2 layers=4", SIXTEEN), ("mode=isp tied=false tp=4 pp=2 dp=2 wp=2", EVO)]
)
def test_docstrings_of_megatron_and_internevo(words: str, table: dict[str, str]) -> None:
    layout = Case.parse(words).layout
    assert {axes: layout.groups(axes) for axes in table} == {axes: read(text) for axes, text in table.items()}


def test_sources_are_the_first_members() -> None:
    assert [Case.parse("tp=4 kv_heads=4").layout.source("tp", rank) for rank in range(4)] == [0, 0, 0, 0]
    layout = Case.parse("tp=2 cp=2 dp=2 pp=2 seq=16").layout
    assert [layout.source(axes, 15) for axes in ("tp", "tp-pp", "dp", "dp-cp", "pp")] == [14, 6, 11, 9, 7]
