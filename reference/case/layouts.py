"""The rank orders of a case: its axes, composite ones too, by which its ranks are laid out (around.md 11)."""

from __future__ import annotations

import functools
import math
from typing import Any

from reference.case.modes import MODES
from reference.groups import Layout, RankOrder, megatron

__all__ = ["layout_of"]


def layout_of(case: Any) -> Layout:
    """The rank orders over a case's ranks: weights have their own in isp, and so have shards of parameters; with
    context ranks, what they and data ranks are together, and the two levels of an exchange inside of a ring.
    """
    wp = case.wp if MODES[case.mode].gathers_weights else 0
    return _layout((case.tp, case.cp, case.dp, case.pp), case.order, shard=case.shard, wp=wp, cp_inner=case.cp_inner)


@functools.lru_cache(maxsize=64)
def _layout(sizes: tuple[int, int, int, int], order: str, *, shard: int, wp: int, cp_inner: int) -> Layout:
    """The layout of these sizes of tp, cp, dp and pp; `wp` is 0 where weights are not gathered."""
    tp, cp, dp, pp = sizes
    ranks = megatron(world=math.prod(sizes), tp=tp, cp=cp, pp=pp, order=order).orders[0]
    orders = [ranks]
    if shard:
        orders.append(ranks.divided("dp", shard=shard, replica=dp // shard))
    if wp:
        orders.append(RankOrder((("wp", wp), ("wdp", tp * cp * dp // wp), ("pp", pp))))
    if cp_inner > 1:
        orders.append(ranks.divided("cp", cp_inner=cp_inner, cp_outer=cp // cp_inner))
    return Layout(orders=tuple(orders), joined={"dp_cp": "dp-cp"} if cp > 1 else {})
