"""The layouts of real systems from the sizes that users state; sizes count ranks, `world` gives the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reference.errors import CaseError
from reference.groups import Groups, Layout, RankOrder
from reference.groups.orders import check_size

_STAGE = "ranks of a pipeline stage"


def megatron(
    *,
    world: int,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int | None = None,
    etp: int | None = None,
    order: str = "tp-cp-ep-dp-pp",
) -> Layout:
    """Megatron-Core's groups: dense axes tp, cp, dp, pp and, with `ep`, expert axes etp, ep, edp, pp; one order string.

    In the order `tp` also places etp, and `dp` edp; etp defaults to tp. Megatron itself always has expert axes, of ep=1
    if there are no experts, and so refuses more orders: with pp > 1 and cp > 1 all that do not end in pp. Source:
    `parallel_state.py`, initialize_model_parallel (0.16.1). Raises CaseError for sizes that do not divide the world,
    and for an order that puts the pipelines of dense and expert weights on different ranks.
    """
    dp = _rest(world, tp=tp, cp=cp, pp=pp)
    dense = RankOrder.of(order, {"tp": tp, "cp": cp, "ep": 1, "dp": dp, "pp": pp})
    orders = [_named(dense, "tp cp dp pp")]
    if ep is not None:
        etp = tp if etp is None else etp
        edp = _experts(world // pp, "etp", etp, ep)
        expert = RankOrder.of(order, {"tp": etp, "cp": 1, "ep": ep, "dp": edp, "pp": pp})
        orders.append(_named(expert, "tp=etp ep dp=edp pp"))
        _check_pipelines(order, *orders)
    elif etp is not None:
        raise CaseError("etp", etp, "is a size of experts: it needs ep", "ep=1")
    return Layout(orders=tuple(orders))


def internevo(
    *, world: int, tp: int = 1, pp: int = 1, wp: int | None = None, zero1: int | None = None, ep: int = 1, ewp: int = 1
) -> Layout:
    """InternEvo's groups: tp, dp, pp; zero1 inside the data group; experts inside it too.

    `wp` is given for isp alone, whose weights have axes wp, wdp, pp; zero1 then cuts wdp, and experts have axes ewp,
    ep, edp, pp. Without it they have etp = tp, ep, edp, pp. `zero1` defaults to all of the group that it cuts, its
    copies are the axis zero1_copies. Source: `core/context/process_group_initializer.py` (0.5.2): Initializer_Pipeline,
    _Tensor, _Data, _Weight, _Weight_Data, _Zero1, _Zero1_ISP, _Expert_Data, _Expert_Weight_Data. Raises CaseError for
    sizes that do not divide.
    """
    dp = _rest(world, tp=tp, pp=pp)
    if wp is None and ewp != 1:
        raise CaseError("ewp", ewp, "experts are gathered over ranks only where weights are: it needs wp", "ewp=1")
    stage = world // pp
    shared = dp if wp is None else _cut("wp", wp, stage, _STAGE)
    zero1 = shared if zero1 is None else zero1
    copies = _cut("zero1", zero1, shared, "ranks with equal weights")
    first, cut = ("tp", tp) if wp is None else ("wp", wp)
    expert, width = ("etp", tp) if wp is None else ("ewp", ewp)
    edp = _experts(stage, expert, width, ep)
    orders = [
        RankOrder((("tp", tp), ("dp", dp), ("pp", pp))),
        RankOrder(((first, cut), ("zero1", zero1), ("zero1_copies", copies), ("pp", pp))),
        RankOrder(((expert, width), ("ep", ep), ("edp", edp), ("pp", pp))),
    ]
    if wp is not None:
        orders.append(RankOrder((("wp", wp), ("wdp", shared), ("pp", pp))))
    return Layout(orders=tuple(orders))


def picotron(*, world: int, tp: int = 1, cp: int = 1, pp: int = 1) -> Layout:
    """picotron's groups: tp, cp, pp, dp, the data axis slowest. Source: `process_group_manager.py`.

    Raises CaseError when the sizes do not divide the world.
    """
    dp = _rest(world, tp=tp, cp=cp, pp=pp)
    return Layout(orders=(RankOrder((("tp", tp), ("cp", cp), ("pp", pp), ("dp", dp))),))


def torchtitan(
    *, world: int, tp: int = 1, cp: int = 1, dp_replicate: int = 1, pp: int = 1, ep: int = 1, etp: int = 1
) -> Layout:
    """torchtitan's groups: tp, cp, dp_shard, dp_replicate, pp, and for experts etp, ep, efsdp, dp_replicate, pp.

    FSDP cuts weights over "dp_shard-cp" and experts over "efsdp"; a batch is dealt over "dp_replicate-dp_shard".
    Source: `distributed/parallel_dims.py`, ParallelDims.build_mesh. Raises CaseError for sizes that do not divide and
    for an etp other than 1 and tp.
    """
    dp_shard = _rest(world, tp=tp, cp=cp, dp_replicate=dp_replicate, pp=pp)
    if etp not in (1, tp):
        raise CaseError("etp", etp, f"must be 1 or tp={tp}", f"etp={tp}")
    efsdp = _experts(tp * cp * dp_shard, "etp", etp, ep)
    slow = (("dp_replicate", dp_replicate), ("pp", pp))
    dense = RankOrder((("tp", tp), ("cp", cp), ("dp_shard", dp_shard), *slow))
    return Layout(orders=(dense, RankOrder((("etp", etp), ("ep", ep), ("efsdp", efsdp), *slow))))


def _rest(world: int, **sizes: int) -> int:
    """Ranks of the axis that is left when these sizes are taken. Raises CaseError when they do not divide the world."""
    for field, size in {"world": world, **sizes}.items():
        check_size(field, size)
    product = math.prod(sizes.values())
    if world % product:
        legal = max(world // product, 1) * product
        raise CaseError("world", world, f"must be a multiple of {'*'.join(sizes)}={product}", f"world={legal}")
    return world // product


def _cut(field: str, size: int, whole: int, what: str) -> int:
    """Parts of `size` ranks in `whole` ranks. Raises CaseError when it does not divide."""
    check_size(field, size)
    if whole % size:
        legal = max(part for part in range(1, min(size, whole) + 1) if whole % part == 0)
        raise CaseError(field, size, f"must divide {whole}, the {what}", f"{field}={legal}")
    return whole // size


def _experts(stage: int, field: str, width: int, ep: int) -> int:
    """Copies of each expert in a pipeline stage. Raises CaseError for the expert size that does not divide."""
    return _cut("ep", ep, _cut(field, width, stage, _STAGE), f"{_STAGE} over {field}={width}")


def _check_pipelines(order: str, dense: RankOrder, expert: RankOrder) -> None:
    """Raise CaseError for an order with which Megatron refuses experts, naming the order that has pp last."""
    dp, edp, pp = dense.sizes["dp"], expert.sizes["edp"], dense.sizes["pp"]
    words = [word for word in order.lower().split("-") if word != "pp"]
    legal = f"order={'-'.join([*words, 'pp'])}"
    if pp > 1 and not order.lower().endswith("pp") and dp != edp:
        raise CaseError("order", order, f"must end in pp, as dp={dp} differs from edp={edp} of the experts", legal)
    if dense.groups("pp") != expert.groups("pp"):
        raise CaseError("order", order, "places the pipelines of dense and expert weights on different ranks", legal)


def _named(order: RankOrder, names: str) -> RankOrder:
    """The axes of an order that stand in `names`, "dp=edp" under another name; all others have one rank."""
    new = {word.partition("=")[0]: word.rpartition("=")[2] for word in names.split()}
    return RankOrder(tuple((new[axis], size) for axis, size in order.axes if axis in new))


def levels(ranks: Sequence[int], sizes: Sequence[int]) -> tuple[Groups, ...]:
    """One group cut into levels: level 0 groups neighbours, each higher level strides over the lower ones.

    Megatron-Core cuts the context group into [inner, outer] for all-to-all and point-to-point, and the dp-cp group into
    [ranks of one optimizer instance, instances]. Raises CaseError when the sizes do not multiply to the group's.
    """
    for size in sizes:
        check_size("level", size)
    if math.prod(sizes) != len(ranks):
        written = "x".join(map(str, sizes))
        raise CaseError("levels", written, f"must multiply to the {len(ranks)} ranks of the group", f"{len(ranks)}")
    mesh = RankOrder(tuple((str(level), size) for level, size in enumerate(sizes)))
    return tuple(tuple(tuple(ranks[i] for i in group) for group in groups) for groups in mesh.lists().values())


def hybrid(ranks: Sequence[int]) -> dict[int, Groups]:
    """Size -> blocks of that many neighbours, for each power of two above 1 and below the largest in the group.

    Megatron-Core's groups of hybrid data and context parallelism. Raises CaseError when a size leaves a smaller last
    block: sizes of groups must divide.
    """
    check_size("ranks", len(ranks))
    sizes = [2**power for power in range(1, int(math.log2(len(ranks))))]
    if sizes and len(ranks) % sizes[-1]:
        legal = 2 ** int(math.log2(len(ranks)))
        raise CaseError("ranks", len(ranks), f"blocks of {sizes[-1]} must divide the group", f"a group of {legal}")
    return {size: tuple(tuple(ranks[i : i + size]) for i in range(0, len(ranks), size)) for size in sizes}
