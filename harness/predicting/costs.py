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

from harness.predicting.clusters import Cluster


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
    ring, tree = _RING.get(op), _TREE.get(op)
    if ring is None and tree is None:
        raise ValueError(f"op={op}: has no formula; legal: {' '.join(dict.fromkeys([*_RING, *_TREE]))}")
    costs = {name: f(payload_bytes, way) for name, f in (("ring", ring), ("tree", tree)) if f is not None}
    return costs.get(algorithm, min(costs.values()))


def _turns(way: Route) -> int:
    return math.ceil(math.log2(way.size))


def _share(n: int, way: Route) -> float:
    return (way.size - 1) / way.size * n * way.byte_s


def _half_ring(n: int, way: Route) -> float:
    return (way.size - 1) * way.latency_s + _share(n, way)


def _one_way_ring(n: int, way: Route) -> float:
    return (way.size - 1) * way.latency_s + n * way.byte_s


def _one_way_tree(n: int, way: Route) -> float:
    return _turns(way) * way.latency_s + n * way.byte_s


def _rooted(n: int, way: Route) -> float:
    return (way.size - 1) * (way.latency_s + n * way.byte_s)


def _message(n: int, way: Route) -> float:
    return way.latency_s + n * way.byte_s


_Formula = Callable[[int, Route], float]
_RING: dict[str, _Formula] = {
    "all_reduce": lambda n, way: 2 * (way.size - 1) * way.latency_s + 2 * _share(n, way),
    "all_gather": _half_ring,
    "reduce_scatter": _half_ring,
    "broadcast": _one_way_ring,
    "reduce": _one_way_ring,
    "all_to_all": lambda n, way: (
        (way.size - 1) * way.latency_s + max(share * n * byte_s for share, byte_s in way.crossing)
    ),
    "gather": _rooted,
    "scatter": _rooted,
    "send": _message,
    "recv": _message,
}
_TREE: dict[str, _Formula] = {
    "all_reduce": lambda n, way: 2 * _turns(way) * way.latency_s + 2 * n * way.byte_s,
    "broadcast": _one_way_tree,
    "reduce": _one_way_tree,
    "barrier": lambda _n, way: 2 * _turns(way) * way.latency_s,
}
