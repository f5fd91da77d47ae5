"""The rank orders of a case: its axes, composite ones too, by which its ranks are laid out (around.md 11)."""

from __future__ import annotations

from typing import Any

from reference.case.modes import MODES
from reference.groups import Layout, RankOrder, megatron

__all__ = ["layout_of"]


def layout_of(case: Any) -> Layout:
    """The rank orders over a case's ranks: weights have their own in isp, and so have shards of parameters; with
    context ranks, what they and data ranks are together, and the two levels of an exchange inside of a ring.
    """
    ranks = megatron(world=case.world_size, tp=case.tp, cp=case.cp, pp=case.pp, order=case.order).orders[0]
    orders = [ranks]
    if case.shard:
        orders.append(ranks.divided("dp", shard=case.shard, replica=case.dp // case.shard))
    if MODES[case.mode].gathers_weights:
        wdp = case.tp * case.cp * case.dp // case.wp
        orders.append(RankOrder((("wp", case.wp), ("wdp", wdp), ("pp", case.pp))))
    if case.cp_inner > 1:
        orders.append(ranks.divided("cp", cp_inner=case.cp_inner, cp_outer=case.cp // case.cp_inner))
    return Layout(orders=tuple(orders), joined={"dp_cp": "dp-cp"} if case.cp > 1 else {})
