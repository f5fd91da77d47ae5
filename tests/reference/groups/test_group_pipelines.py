"""Stages, chunks, neighbours and embedding groups of a pipeline; refused requests for groups, word for word."""

from collections.abc import Callable

import pytest

from reference.errors import CaseError
from reference.groups import Layout, PipelineGroup, RankOrder

CHUNKED = PipelineGroup(ranks=(0, 4, 8, 12), chunks=2)
SIZES = {"tp": 2, "dp": 3, "pp": 1}
MESH = RankOrder.of("tp-dp-pp", SIZES)
FOUR = PipelineGroup(ranks=(0, 2, 4, 6), chunks=2)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no size": (lambda: RankOrder.of("tp", {"tp": 0}), "tp=0: must be a whole number of at least 1; legal: tp=1"),
    "unknown axis": (lambda: RankOrder.of("tp-xp", {"tp": 1}), "order=tp-xp: 'xp' is not an axis; legal: order=tp"),
    "axis twice": (lambda: RankOrder.of("tp-dp-tp", SIZES), "order=tp-dp-tp: names tp twice; legal: order=tp-dp"),
    "axis left out": (
        lambda: RankOrder.of("tp-pp", SIZES),
        "order=tp-pp: must name dp, whose size is 3; legal: order=tp-pp-dp",
    ),
    "group": (lambda: MESH.groups("tp-cp"), "group=tp-cp: 'cp' is not an axis of this mesh; legal: tp-dp-pp"),
    "group of two orders": (
        lambda: Layout(orders=(MESH, RankOrder((("etp", 2), ("ep", 3))))).groups("tp-ep"),
        "group=tp-ep: its axes must stand in one rank order; legal: axes of tp-dp-pp or of etp-ep",
    ),
    "rank": (lambda: MESH.group("tp", 6), "rank=6: must be one of 6 ranks; legal: 0..5"),
    "no axis to divide": (
        lambda: RankOrder.of("tp", {"tp": 4}).divided("cp", inner=2, outer=2),
        "axis=cp: is not an axis of this mesh; legal: tp",
    ),
    "a divided axis": (
        lambda: RankOrder.of("tp", {"tp": 4}).divided("tp", inner=2, outer=3),
        "tp=4: cannot be divided into 2x3; legal: sizes that multiply to it",
    ),
    "chunks": (
        lambda: PipelineGroup(ranks=(3,), chunks=2),
        "chunks=2: more than one chunk needs pp of at least 2; legal: chunks=1",
    ),
    "no stage": (lambda: PipelineGroup(ranks=()), "pp=0: must be a whole number of at least 1; legal: pp=1"),
    "rank elsewhere": (lambda: FOUR.stage(1), "rank=1: is not in this pipeline; legal: 0 2 4 6"),
    "chunk": (lambda: FOUR.virtual_stage(0, 2), "chunk=2: must be one of 2 chunks; legal: 0..1"),
    "layers": (
        lambda: FOUR.layers(12, 0),
        "layers=12: must share evenly over 4 stages of 2 chunks, unless first_layers= or last_layers= is given; "
        "legal: layers=8",
    ),
    "first layers": (
        lambda: FOUR.layers(16, 0, first=3),
        "first_layers=3: must be a multiple of chunks=2; legal: first_layers=2",
    ),
    "first layers alone": (
        lambda: PipelineGroup(ranks=(0,)).layers(4, 0, first=2),
        "first_layers=2: needs pp of at least 2; legal: pp=2",
    ),
    "too many": (
        lambda: FOUR.layers(8, 0, first=8, last=2),
        "layers=8: must leave first_layers + last_layers = 10 and a multiple of 4; legal: layers=14",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_field_value_rule_and_a_legal_value(name: str) -> None:
    request, message = REFUSED[name]
    with pytest.raises(CaseError) as refused:
        request()
    assert str(refused.value) == message


def test_the_layers_of_chunks() -> None:
    """The docstring of initialize_model_parallel: 16 layers, 4 ranks of 2 chunks, counted there from 1."""
    held = [[[*CHUNKED.layers(16, rank, chunk)] for chunk in (0, 1)] for rank in CHUNKED.ranks]
    assert [CHUNKED.virtual_stage(8, chunk) for chunk in (0, 1)] == [2, 6]
    assert held == [[[0, 1], [8, 9]], [[2, 3], [10, 11]], [[4, 5], [12, 13]], [[6, 7], [14, 15]]]
