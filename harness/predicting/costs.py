"""Costs of collectives: the alpha-beta model, ring and tree, over the links that its group uses.

p ranks, n bytes of payload as the ledger counts it, a seconds a message, b seconds a byte:

    op                             ring                             tree
    all_reduce                     2(p-1) a + 2 (p-1)/p n b         2 ceil(log2 p) a + 2 n b
    all_gather, reduce_scatter     (p-1) a + (p-1)/p n b            -
    broadcast, reduce              (p-1) a + n b                    ceil(log2 p) a + n b
    all_to_all                     (p-1) a + what crosses each link -
    gather, scatter                (p-1) (a + n b)                  -
    send, recv                     a + n b                          -
    barrier                        -                                2 ceil(log2 p) a

Trees are pipelined double binary trees, so that bytes flow at full speed. Where only one algorithm has a formula it
counts, whatever the cluster says.

Links: a group uses the innermost link that joins all its ranks. When r of its ranks share a domain of the next inner
link, r ports work at once: b = 1 / min(r B_outer, B_inner). In an all_to_all a rank sends (p-r)/p n through its own
outer port and the rest inside, both at once. Groups beside each other do not disturb each other: every rank has its own
port on every link, and switches do not block.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005). Sanders,
Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009). NCCL's performance notes
(bus bandwidth). Units: seconds, bytes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardproof.harness.predicting.clusters import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How a group's bytes travel: its size, the outermost link it uses, and the speeds on the way.

    `crossing` are (share of a rank's all_to_all that goes through a link, seconds a byte there), inner links first.
    """

    size: int
    link: str
    latency_s: float
    byte_s: float
    crossing: tuple[tuple[float, float], ...] = ()


def route(ranks: Sequence[int], cluster: Cluster) -> Route:
    """The way of a group of global ranks."""
    size = len(ranks)
    rate, link, latency_s, inside = 0.0, cluster.links[0].name, 0.0, 1
    crossing = []
    for each in cluster.links:
        together = sum(rank // each.ranks == ranks[0] // each.ranks for rank in ranks) if each.ranks else size
        if together > inside:
            own = each.bytes_per_s
            rate = min(inside * own, rate) if inside > 1 else own
            link, latency_s = each.name, each.latency_us * 1e-6
            crossing.append(((together - inside) / size, 1 / own))
            inside = together
        if inside == size:
            break
    byte_s = 1 / rate if rate else 0.0
    return Route(size=size, link=link, latency_s=latency_s, byte_s=byte_s, crossing=tuple(crossing))


def seconds(op: str, payload_bytes: int, way: Route, algorithm: str = "best") -> float:
    """Seconds of one call when all ranks come at once, 0 in a group of one. Raises ValueError for an unknown op."""
    if way.size == 1:
        return 0.0
    costs: dict[str, float] = {}
    for name, counts in (("ring", _RING), ("tree", _TREE)):
        if op in counts:
            messages, passes = counts[op](way.size)
            crossing = way.crossing if op == "all_to_all" else ((passes, way.byte_s),)
            costs[name] = messages * way.latency_s + max(share * payload_bytes * byte_s for share, byte_s in crossing)
    if not costs:
        raise ValueError(f"op={op}: has no formula; legal: {' '.join(dict.fromkeys([*_RING, *_TREE]))}")
    return costs.get(algorithm, min(costs.values()))


def _turns(p: int) -> int:
    return math.ceil(math.log2(p))


_Counts = dict[str, Callable[[int], tuple[float, float]]]
"""Op -> of the ranks: how many messages follow each other, and how many payloads a rank sends."""
_RING: _Counts = {
    "all_reduce": lambda p: (2 * (p - 1), 2 * (p - 1) / p),
    **dict.fromkeys(("all_gather", "reduce_scatter"), lambda p: (p - 1, (p - 1) / p)),
    **dict.fromkeys(("broadcast", "reduce"), lambda p: (p - 1, 1)),
    "all_to_all": lambda p: (p - 1, math.nan),  # its payload goes through several links
    **dict.fromkeys(("gather", "scatter"), lambda p: (p - 1, p - 1)),
    **dict.fromkeys(("send", "recv"), lambda p: (1, 1)),
}
_TREE: _Counts = {
    "all_reduce": lambda p: (2 * _turns(p), 2),
    **dict.fromkeys(("broadcast", "reduce"), lambda p: (_turns(p), 1)),
    "barrier": lambda p: (2 * _turns(p), 0),
}
