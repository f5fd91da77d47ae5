"""Rank groups and pipelines: laws over drawn meshes, tables of documents, Megatron-Core's own groups, refusals."""

import math
from collections.abc import Callable
from itertools import combinations, permutations, product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from shardproof.reference.case import Case
from shardproof.reference.errors import CaseError
from shardproof.reference.language.groups import Groups, Layout, PipelineGroup, RankOrder
from shardproof.suites.drawing.strategies import cases


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


FOUR_AXES, EXPERTS = "tp=2 cp=2 dp=2 pp=2 seq=16 order=", "mode=tp-sp tp=2 pp=2 dp=4 layers=2 experts=8 "
EVO = "mode=isp tied=false tp=4 pp=2 dp=2 wp=2"
DENSE_GROUPS, EXPERT_GROUPS = "tp cp dp pp tp-pp dp-cp", "etp ep edp etp-ep etp-ep-pp"
TABLE = [
    # Megatron-Core 0.16.1, 16 ranks
    (f"{FOUR_AXES}tp-cp-ep-dp-pp", DENSE_GROUPS, "0,1 | 0,2 1,3 | 0,4 1,5 | 0,8 | 0,1,8,9 | 0,2,4,6"),
    (f"{FOUR_AXES}tp-cp-ep-pp-dp", DENSE_GROUPS, "0,1 | 0,2 1,3 | 0,8 1,9 | 0,4 | 0,1,4,5 | 0,2,8,10"),
    (f"{FOUR_AXES}cp-tp-dp-pp", DENSE_GROUPS, "0,2 1,3 | 0,1 2,3 | 0,4 1,5 | 0,8 | 0,2,8,10 | 0,1,4,5"),
    (f"{FOUR_AXES}pp-dp-cp-tp", DENSE_GROUPS, "0,8 | 0,4 | 0,2 | 0,1 | 0,1,8,9 | 0,2,4,6"),
    (f"{EXPERTS}etp=1 ep=4", EXPERT_GROUPS, "0 | 0,1,2,3 4,5,6,7 | 0,4 1,5 | 0,1,2,3 | 0,1,2,3,8,9,10,11"),
    (f"{EXPERTS}etp=2 ep=2", EXPERT_GROUPS, "0,1 | 0,2 1,3 | 0,4 1,5 | 0,1,2,3 |"),
    (f"{EXPERTS}etp=2 ep=4", EXPERT_GROUPS, "0,1 | 0,2,4,6 1,3,5,7 | 0 | 0,1,2,3,4,5,6,7 |"),
    # the docstring of initialize_model_parallel: two machines, 16 devices
    ("tp=2 pp=4 dp=2 layers=4", "dp", "0,2 1,3 4,6 5,7 8,10 9,11 12,14 13,15"),
    ("tp=2 pp=4 dp=2 layers=4", "tp", "0,1 2,3 4,5 6,7 8,9 10,11 12,13 14,15"),
    ("tp=2 pp=4 dp=2 layers=4", "pp", "0,4,8,12 1,5,9,13 2,6,10,14 3,7,11,15"),
    ("tp=2 pp=4 dp=2 layers=4", "tp-pp", "0,1,4,5,8,9,12,13 2,3,6,7,10,11,14,15"),
    # the docstring of Initializer_Zero1_ISP: n=16 tp/sp=4 pp=2 dp=2 wp=2 wdp=4
    (EVO, "wp", "0,1 2,3 4,5 6,7 8,9 10,11 12,13 14,15"),
    (EVO, "dp", "0,4 1,5 2,6 3,7 8,12 9,13 10,14 11,15"),
    (EVO, "pp", "0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15"),
    (EVO, "wdp", "0,2,4,6 1,3,5,7 8,10,12,14 9,11,13,15"),
]
"""Words of a case, axes, and the first groups along each of these."""


@pytest.mark.parametrize(("words", "every", "table"), TABLE)
def test_groups_are_those_that_are_published(words: str, every: str, table: str) -> None:
    case = Case.parse(words)
    for axes, text in zip(every.split(), table.split("|"), strict=True):
        right: Groups = tuple(tuple(map(int, group.split(","))) for group in text.split())
        assert case.layout.groups(axes)[: len(right)] == right, axes
        if (axis := "dp_cp" if axes == "dp-cp" else axes) in case.axes:
            assert case.axes[axis][: len(right)] == right, axes
    for axis in case.axis_sizes:
        assert all(case.axis_rank(axis, rank) == ranks.index(rank) for ranks in case.axes[axis] for rank in ranks)


def test_an_order_numbers_experts_too() -> None:
    case = Case.parse("mode=tp-sp tp=2 dp=4 etp=2 ep=2 experts=8 order=dp-tp-ep")
    assert case.axes["tp"][0] == (0, 4) and case.axes["edp"][0] == (0, 1)
    assert case.axes["etp"][0] == (0, 2) and case.axes["ep"][0] == (0, 4)


def test_sources_are_the_first_members() -> None:
    assert [Case.parse("tp=4 kv_heads=4").layout.source("tp", rank) for rank in range(4)] == [0, 0, 0, 0]
    layout = Case.parse("tp=2 cp=2 dp=2 pp=2 seq=16").layout
    assert [layout.source(axes, 15) for axes in ("tp", "tp-pp", "dp", "dp-cp", "pp")] == [14, 6, 11, 9, 7]


CHUNKED = PipelineGroup(ranks=(0, 4, 8, 12), chunks=2)
SIZES = {"tp": 2, "dp": 3, "pp": 1}
MESH = RankOrder.of("tp-dp-pp", SIZES)
TP = RankOrder.of("tp", {"tp": 4})
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: RankOrder.of("tp", {"tp": 0}), "tp=0: must be a whole number of at least 1; legal: tp=1"),
    (lambda: RankOrder.of("tp-xp", {"tp": 1}), "order=tp-xp: 'xp' is not an axis; legal: order=tp"),
    (lambda: RankOrder.of("tp-dp-tp", SIZES), "order=tp-dp-tp: names tp twice; legal: order=tp-dp"),
    (lambda: RankOrder.of("tp-pp", SIZES), "order=tp-pp: must name dp, whose size is 3; legal: order=tp-pp-dp"),
    (lambda: MESH.groups("tp-cp"), "group=tp-cp: 'cp' is not an axis of this mesh; legal: tp-dp-pp"),
    (
        lambda: Layout(orders=(MESH, RankOrder((("etp", 2), ("ep", 3))))).groups("tp-ep"),
        "group=tp-ep: its axes must stand in one rank order; legal: axes of tp-dp-pp or of etp-ep",
    ),
    (lambda: MESH.group("tp", 6), "rank=6: must be one of 6 ranks; legal: 0..5"),
    (lambda: TP.divide("cp", inner=2, outer=2), "axis=cp: is not an axis of this mesh; legal: tp"),
    (lambda: TP.divide("tp", inner=2, outer=3), "tp=4: cannot be divided into 2x3; legal: sizes that multiply to it"),
    (
        lambda: PipelineGroup(ranks=(3,), chunks=2),
        "chunks=2: more than one chunk needs pp of at least 2; legal: chunks=1",
    ),
    (lambda: PipelineGroup(ranks=()), "pp=0: must be a whole number of at least 1; legal: pp=1"),
    (lambda: CHUNKED.stage(1), "rank=1: is not in this pipeline; legal: 0 4 8 12"),
    (lambda: CHUNKED.virtual_stage(0, 2), "chunk=2: must be one of 2 chunks; legal: 0..1"),
    (
        lambda: CHUNKED.layers(12, 0),
        "layers=12: must share evenly over 4 stages of 2 chunks, unless first_layers= or last_layers= is given; "
        "legal: layers=8",
    ),
    (lambda: CHUNKED.layers(16, 0, first=3), "first_layers=3: must be a multiple of chunks=2; legal: first_layers=2"),
    (lambda: PipelineGroup(ranks=(0,)).layers(4, 0, first=2), "first_layers=2: needs pp of at least 2; legal: pp=2"),
    (
        lambda: CHUNKED.layers(8, 0, first=8, last=2),
        "layers=8: must leave first_layers + last_layers = 10 and a multiple of 4; legal: layers=14",
    ),
]


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=[message.partition(":")[0] for _, message in REFUSED])
def test_a_refusal_names_field_value_rule_and_a_legal_value(build: Callable[[], object], message: str) -> None:
    with pytest.raises(CaseError) as refused:
        build()
    assert str(refused.value) == message


def test_the_layers_of_chunks() -> None:
    """The docstring of initialize_model_parallel: 16 layers, 4 ranks of 2 chunks, counted there from 1."""
    held = [[[*CHUNKED.layers(16, rank, chunk)] for chunk in (0, 1)] for rank in CHUNKED.ranks]
    assert [CHUNKED.virtual_stage(8, chunk) for chunk in (0, 1)] == [2, 6]
    assert held == [[[0, 1], [8, 9]], [[2, 3], [10, 11]], [[4, 5], [12, 13]], [[6, 7], [14, 15]]]


def megatron(module: str) -> Any:
    return pytest.importorskip(f"megatron.core.{module}", reason="needs the extra `peers`", exc_type=ImportError)


def of_megatron(test: Any) -> Any:
    return pytest.mark.peers(pytest.mark.filterwarnings("ignore")(test))


DENSE, EXPERT = ("tp", "cp", "dp", "pp"), ("tp", "ep", "dp", "pp")


@st.composite
def meshes(draw: st.DrawFn) -> tuple[str, dict[str, int], dict[str, int]]:
    """Any order of axes, pairwise different dense sizes, and expert sizes that divide."""
    tp, cp, dp, pp = draw(st.permutations((1, 2, 3, 4)))
    stage = tp * cp * dp
    etp = draw(st.sampled_from([part for part in range(1, stage + 1) if stage % part == 0]))
    ep = draw(st.sampled_from([part for part in range(1, stage + 1) if stage // etp % part == 0]))
    order = "-".join(draw(st.permutations(("tp", "cp", "ep", "dp", "pp"))))
    dense = {"tp": tp, "cp": cp, "ep": 1, "dp": dp, "pp": pp}
    return order, dense, {"tp": etp, "cp": 1, "ep": ep, "dp": stage // etp // ep, "pp": pp}


@of_megatron
@settings(max_examples=60, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
@given(meshes(), st.sets(st.sampled_from(DENSE), min_size=2), st.sets(st.sampled_from(EXPERT), min_size=2))
def test_groups_are_those_of_megatrons_generators(
    mesh: tuple[str, dict[str, int], dict[str, int]], some: set[str], some_of_experts: set[str]
) -> None:
    order, *both = mesh
    for sizes, axes, joined in zip(both, (DENSE, EXPERT), (some, some_of_experts), strict=True):
        ours, theirs = RankOrder.of(order, sizes), megatron("parallel_state").RankGenerator(**sizes, order=order)
        for words in [*axes, "-".join(joined)]:
            assert [[*group] for group in ours.groups(words)] == theirs.get_ranks(words)


@of_megatron
@settings(max_examples=30, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_the_first_layer_of_each_chunk_is_megatrons(data: st.DataObject) -> None:
    offset = megatron("transformer.transformer_layer").get_transformer_layer_offset
    stages, chunks, middle = (data.draw(st.integers(low, high)) for low, high in ((2, 5), (1, 3), (1, 3)))
    first, last = (data.draw(st.none() | st.integers(1, 3).map(lambda n: n * chunks)) for _ in range(2))
    pipeline = PipelineGroup(ranks=tuple(range(stages)), chunks=chunks)
    others = stages - (first is not None) - (last is not None)
    count = (first or 0) + (last or 0) + others * chunks * middle
    assume(others or chunks == 1)  # there 0.16.1 divides by zero
    config = SimpleNamespace(
        pipeline_model_parallel_size=stages,
        pipeline_model_parallel_layout=None,
        num_layers=count,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    for rank in pipeline.ranks:
        for chunk in range(chunks):
            theirs = offset(config, vp_stage=chunk if chunks > 1 else None, pp_rank=rank)
            assert pipeline.layers(count, rank, chunk, first=first, last=last).start == theirs


@of_megatron
def test_who_holds_the_embeddings_is_megatrons() -> None:
    for ranks in ((3,), (0, 4, 8, 12)):
        pipeline = PipelineGroup(ranks=ranks)
        assert [*pipeline.embedding_ranks()] == megatron("parallel_state").default_embedding_ranks([*ranks])
