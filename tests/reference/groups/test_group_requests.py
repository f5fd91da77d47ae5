"""Requests that are refused: each message names the field, its value, the rule and a legal value."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reference.errors import CaseError
from reference.groups import PipelineGroup, RankOrder
from tests.reference.groups.systems import hybrid, internevo, levels, megatron, picotron, torchtitan

SIZES = {"tp": 2, "dp": 3, "pp": 1}
MESH = RankOrder.of("tp-dp-pp", SIZES)
FOUR = PipelineGroup(ranks=(0, 2, 4, 6), chunks=2)
GUARDED = {"world": 16, "tp": 2, "pp": 2, "etp": 1, "ep": 4}
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "world": (lambda: megatron(world=16, tp=3, cp=2), "world=16: must be a multiple of tp*cp*pp=6; legal: world=12"),
    "small world": (lambda: picotron(world=2, tp=4), "world=2: must be a multiple of tp*cp*pp=4; legal: world=4"),
    "no size": (lambda: megatron(world=16, tp=0), "tp=0: must be a whole number of at least 1; legal: tp=1"),
    "half a size": (lambda: megatron(world=16, ep=0.5), "ep=0.5: must be a whole number of at least 1; legal: ep=1"),  # type: ignore[arg-type]
    "unknown axis": (
        lambda: megatron(world=16, tp=2, order="tp-xp-dp"),
        "order=tp-xp-dp: 'xp' is not an axis; legal: order=tp-cp-ep-dp-pp",
    ),
    "axis twice": (lambda: RankOrder.of("tp-dp-tp", SIZES), "order=tp-dp-tp: names tp twice; legal: order=tp-dp"),
    "axis left out": (
        lambda: RankOrder.of("tp-pp", SIZES),
        "order=tp-pp: must name dp, whose size is 3; legal: order=tp-pp-dp",
    ),
    "ep": (
        lambda: megatron(world=24, tp=2, pp=2, ep=5),
        "ep=5: must divide 6, the ranks of a pipeline stage over etp=2; legal: ep=3",
    ),
    "etp": (
        lambda: megatron(world=24, tp=2, pp=2, ep=1, etp=5),
        "etp=5: must divide 12, the ranks of a pipeline stage; legal: etp=4",
    ),
    "etp alone": (lambda: megatron(world=4, etp=2), "etp=2: is a size of experts: it needs ep; legal: ep=1"),
    "pp not last": (
        lambda: megatron(**GUARDED, order="tp-cp-ep-pp-dp"),
        "order=tp-cp-ep-pp-dp: must end in pp, as dp=4 differs from edp=2 of the experts; legal: order=tp-cp-ep-dp-pp",
    ),
    "pipelines apart": (
        lambda: megatron(world=16, tp=2, cp=2, pp=2, etp=1, ep=4, order="tp-pp-cp-ep-dp"),
        "order=tp-pp-cp-ep-dp: places the pipelines of dense and expert weights on different ranks; "
        "legal: order=tp-cp-ep-dp-pp",
    ),
    "group": (lambda: MESH.groups("tp-cp"), "group=tp-cp: 'cp' is not an axis of this mesh; legal: tp-dp-pp"),
    "group of two orders": (
        lambda: megatron(world=4, tp=2, ep=1).groups("tp-ep"),
        "group=tp-ep: its axes must stand in one rank order; legal: axes of tp-cp-dp-pp or of etp-ep-edp-pp",
    ),
    "rank": (lambda: MESH.group("tp", 6), "rank=6: must be one of 6 ranks; legal: 0..5"),
    "place": (lambda: MESH.rank({"dp": 3}), "dp=3: must be a place on an axis of 3; legal: 0..2"),
    "place on no axis": (lambda: MESH.rank({"cp": 0}), "axis=cp: is not an axis of this mesh; legal: tp dp pp"),
    "levels": (lambda: levels(range(8), (2, 3)), "levels=2x3: must multiply to the 8 ranks of the group; legal: 8"),
    "hybrid": (lambda: hybrid(range(10)), "ranks=10: blocks of 4 must divide the group; legal: a group of 8"),
    "zero1": (
        lambda: internevo(world=16, tp=4, zero1=3),
        "zero1=3: must divide 4, the ranks with equal weights; legal: zero1=2",
    ),
    "wp": (lambda: internevo(world=16, pp=2, wp=3), "wp=3: must divide 8, the ranks of a pipeline stage; legal: wp=2"),
    "ewp": (
        lambda: internevo(world=16, ewp=2),
        "ewp=2: experts are gathered over ranks only where weights are: it needs wp; legal: ewp=1",
    ),
    "no axis to divide": (
        lambda: RankOrder.of("tp", {"tp": 4}).divided("cp", inner=2, outer=2),
        "axis=cp: is not an axis of this mesh; legal: tp",
    ),
    "a divided axis": (
        lambda: RankOrder.of("tp", {"tp": 4}).divided("tp", inner=2, outer=3),
        "tp=4: cannot be divided into 2x3; legal: sizes that multiply to it",
    ),
    "torchtitan's etp": (lambda: torchtitan(world=16, tp=4, etp=2), "etp=2: must be 1 or tp=4; legal: etp=4"),
    "chunks": (
        lambda: PipelineGroup(ranks=(3,), chunks=2),
        "chunks=2: more than one chunk needs pp of at least 2; legal: chunks=1",
    ),
    "no stage": (lambda: PipelineGroup(ranks=()), "pp=0: must be a whole number of at least 1; legal: pp=1"),
    "rank elsewhere": (lambda: FOUR.next_rank(1), "rank=1: is not in this pipeline; legal: 0 2 4 6"),
    "chunk": (lambda: FOUR.first_stage(0, 2), "chunk=2: must be one of 2 chunks; legal: 0..1"),
    "prediction": (
        lambda: FOUR.embedding_ranks(prediction=[8]),
        "prediction=8: must be one of 8 virtual stages; legal: 0..7",
    ),
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


@pytest.mark.parametrize("order", ["tp-cp-ep-pp-dp", "tp-pp-cp-ep-dp", "cp-tp-pp-ep-dp"])
def test_megatron_refuses_these_orders(order: str) -> None:
    with pytest.raises(CaseError):
        megatron(**GUARDED, order=order)
    assert megatron(**GUARDED, order="TP-CP-EP-DP-PP") == megatron(**GUARDED)  # type: ignore[arg-type]
