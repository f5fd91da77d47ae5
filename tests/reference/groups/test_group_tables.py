"""The rank tables of documents, typed from them: Megatron-Core's and InternEvo's docstrings, runs of real code."""

from __future__ import annotations

import pytest

from reference.case import Case
from reference.groups import Groups, Layout, RankOrder
from tests.reference.groups.systems import hybrid, internevo, levels, megatron, picotron, torchtitan

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
    "zero1": "0,2 1,3 4,6 5,7 8,10 9,11 12,14 13,15",
}
"""n=16 tp/sp=4 pp=2 dp=2 wp=2 wdp=4 zero1=2: the docstring of Initializer_Zero1_ISP."""


def read(text: str) -> Groups:
    return tuple(tuple(map(int, group.split(","))) for group in text.split())


def shown(layout: Layout, axes: str, text: str) -> bool:
    """Whether the groups along these axes begin with those of a table."""
    return layout.groups(axes)[: len(read(text))] == read(text)


@pytest.mark.parametrize("order", TABLE)
def test_sixteen_ranks_in_four_orders(order: str) -> None:
    layout = megatron(world=16, tp=2, cp=2, pp=2, order=order)
    for axes, text in zip("tp cp dp pp tp-pp dp-cp".split(), TABLE[order].split("|"), strict=True):
        assert shown(layout, axes, text), axes


@pytest.mark.parametrize("order", TABLE)
def test_a_case_has_the_groups_of_its_order(order: str) -> None:
    case = Case.parse(f"tp=2 cp=2 dp=2 pp=2 seq=16 order={order}")
    *own, _, together = TABLE[order].split("|")
    for axis, text in zip("tp cp dp pp dp_cp".split(), [*own, together], strict=True):
        assert case.axes[axis][: len(read(text))] == read(text), axis
    for axis in case.axis_sizes:
        assert all(case.axis_rank(axis, rank) == ranks.index(rank) for ranks in case.axes[axis] for rank in ranks)


@pytest.mark.parametrize(("etp", "ep"), EXPERTS)
def test_experts_on_sixteen_ranks(etp: int, ep: int) -> None:
    layout = megatron(world=16, tp=2, pp=2, etp=etp, ep=ep)
    for axes, text in zip("etp ep edp etp-ep etp-ep-pp".split(), EXPERTS[etp, ep].split("|"), strict=False):
        assert shown(layout, axes, text), axes


def test_two_machines_of_eight() -> None:
    layout = megatron(world=16, tp=2, pp=4)
    assert {axes: layout.groups(axes) for axes in SIXTEEN} == {axes: read(text) for axes, text in SIXTEEN.items()}


def test_context_over_groups_of_four() -> None:
    """initialize_model_parallel: 8 devices, tp4 cp2."""
    assert megatron(world=8, tp=4, cp=2).groups("cp") == read("0,4 1,5 2,6 3,7")


def test_sources_are_the_first_members() -> None:
    assert [megatron(world=4, tp=4).source("tp", rank) for rank in range(4)] == [0, 0, 0, 0]
    layout = megatron(world=16, tp=2, cp=2, pp=2)
    sources = [layout.source(axes, 15) for axes in ("tp", "tp-pp", "dp", "dp-cp", "pp")]
    assert sources == [14, 6, 11, 9, 7]


def test_generator_of_the_masked_docstring() -> None:
    """generate_masked_orthogonal_rank_groups: sizes 2, 3, 4 and 2, 2, 2."""
    groups = RankOrder.of("tp-dp-pp", {"tp": 2, "dp": 3, "pp": 4}).groups("dp")
    assert (groups[0], groups[1], groups[7]) == ((0, 2, 4), (1, 3, 5), (19, 21, 23))
    assert RankOrder.of("tp-pp-dp", {"tp": 2, "pp": 2, "dp": 2}).groups("dp") == read("0,4 1,5 2,6 3,7")


def test_levels_of_the_hierarchical_docstring() -> None:
    """create_hierarchical_groups: sizes 2, 2, 4."""
    first, second, third = levels(range(16), (2, 2, 4))
    assert first == read("0,1 2,3 4,5 6,7 8,9 10,11 12,13 14,15")
    assert second == read("0,2 1,3 4,6 5,7 8,10 9,11 12,14 13,15")
    assert third == read("0,4,8,12 1,5,9,13 2,6,10,14 3,7,11,15")
    assert levels((1, 3, 5, 7, 9, 11), (3, 2)) == (read("1,3,5 7,9,11"), read("1,7 3,9 5,11"))


def test_hybrid_blocks() -> None:
    """create_hybrid_dp_cp_groups: all powers of two but 1 and the size of the group."""
    assert hybrid((0, 2, 4, 6, 8, 10, 12, 14)) == {2: read("0,2 4,6 8,10 12,14"), 4: read("0,2,4,6 8,10,12,14")}
    assert hybrid((0, 1)) == hybrid((5,)) == {}


def test_internevo() -> None:
    layout = internevo(world=16, tp=4, pp=2, wp=2, zero1=2)
    assert {axes: layout.groups(axes) for axes in EVO} == {axes: read(text) for axes, text in EVO.items()}
    assert internevo(world=16, tp=4, pp=2, wp=2).groups("zero1") == read(EVO["wdp"])
    assert internevo(world=16, tp=4, pp=2, wp=8).groups("wp") == read("0,1,2,3,4,5,6,7 8,9,10,11,12,13,14,15")
    layout = internevo(world=16, tp=2, pp=2, zero1=2)  # the docstring of Initializer_Zero1
    assert layout.groups("dp") == read("0,2,4,6 1,3,5,7 8,10,12,14 9,11,13,15")
    assert layout.groups("zero1") == read("0,2 1,3 4,6 5,7 8,10 9,11 12,14 13,15")


def test_experts_of_internevo() -> None:
    layout = internevo(world=8, tp=2, ep=2)
    assert sorted(layout.groups("ep")) == sorted(read("0,2 4,6 1,3 5,7"))
    assert sorted(layout.groups("edp")) == sorted(read("0,4 2,6 1,5 3,7"))
    layout = internevo(world=16, wp=1, ewp=2, ep=4)  # the docstring of Initializer_Expert_Weight_Data
    assert layout.groups("ewp") == read("0,1 2,3 4,5 6,7 8,9 10,11 12,13 14,15")
    assert layout.groups("ep") == read("0,2,4,6 1,3,5,7 8,10,12,14 9,11,13,15")
    assert layout.groups("edp") == read("0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15")


def test_picotron_and_torchtitan() -> None:
    layout = picotron(world=24, tp=2, cp=1, pp=3)
    assert layout.groups("pp") == read("0,2,4 1,3,5 6,8,10 7,9,11 12,14,16 13,15,17 18,20,22 19,21,23")
    assert layout.group("dp", 3) == (3, 9, 15, 21)
    layout = torchtitan(world=48, tp=2, cp=2, dp_replicate=2, pp=2, ep=4, etp=1)
    assert layout.group("dp_shard-cp", 1) == (1, 3, 5, 7, 9, 11)
    assert layout.group("dp_replicate", 0) == (0, 12)
    assert layout.group("dp_replicate-dp_shard", 0) == (0, 4, 8, 12, 16, 20)
    assert (layout.group("ep", 5), layout.group("efsdp", 5), layout.group("pp", 5)) == (
        (4, 5, 6, 7),
        (1, 5, 9),
        (5, 29),
    )
