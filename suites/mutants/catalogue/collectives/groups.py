"""Groups: the right call over other ranks, rank arithmetic, splits that split nothing (bugs.md 6e, second)."""

from __future__ import annotations

from suites.mutants.mutant import TENSOR, Change, Mutant, everywhere

__all__ = ["GROUPS"]

_APART = {"isp": "wp!=tp"}
"""Where two axes over the same ranks differ: with equal ones the wrong group is the right one."""
_SUM_DATA = "sync.sum_gradients(gradients.values(), mesh.axis(axis))"
_DATA = everywhere("dp>1", TENSOR) | {"isp": "wdp>1"}
_AXIS = "axes[name] = Axis(name=name, ranks=ranks, rank=ranks.index(rank), group=group)"
_GATHERED = "total = region.gathered(x)"
_LEAVE = "return pairs.reduce_from(y, self.axis)"
_EXCHANGE = "q_pending = start_all_to_all(q, axis, split_dim=_HEADS, gather_dim=_SEQUENCE)"
_UNSPLIT = everywhere("delivery=local", ("tp", "tp-sp")) | everywhere("", ("mtp", "msp", "fsp")) | {"isp": "wp=tp"}
_RULES = Change(
    module="parallel.communication.mesh",
    old="from reference.case import Case\n",
    new="from reference.case import Case\nfrom reference.groups import RankOrder\n",
)


def _relabelled(sizes: str) -> Change:
    """Groups along these axes, the fastest first, in place of the case's: the same on every rank and for all calls."""
    new = f"for name, groups in {{**case.axes, **RankOrder(({sizes})).lists()}}.items():"
    return Change(module="parallel.communication.mesh", old="for name, groups in case.axes.items():", new=new)


_MESH_OF_ONE = Change(
    module="parallel.communication.mesh",
    old=_AXIS,
    new=f'if name in ("tp", "wp"):\n                ranks = (rank,)\n            {_AXIS}',
)


def _step(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.training.step", old=old, new=new),)


def _training(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.training.loop", old=old, new=new),)


GROUPS = (
    Mutant(
        name="norms-summed-over-the-sequence-group",
        stands_for="B-66: InternEvo 0817b8c, the TENSOR group where the WEIGHT group is meant",
        modes=_APART,
        changes=_step("sync.sum_gradients(group, weight_axis,", 'sync.sum_gradients(group, rank.mesh.axis("tp"),'),
        kills="ledger",
        phase="grad_sync",
        region="final_norm|embedding.positions|*_norm",
        cause="wrong_group",
    ),
    Mutant(
        name="weights-gathered-over-the-sequence-group",
        stands_for="B-66: InternEvo 73b6894, the same for the weights themselves",
        modes=_APART,
        changes=(
            Change(
                module="parallel.schemes.weight_parallel",
                old="[Gathers(weights, plan)]",
                new="[Gathers(sequence, plan)]",
            ),
        ),
        kills="run",
        cause="raised|desynchronised",
    ),
    Mutant(
        name="data-axis-of-the-other-order",
        stands_for="B-66: Megatron #7452-4, the default group instead of the explicit one",
        modes={"isp": "wp!=tp wdp>1"},
        changes=(
            Change(
                module="parallel.schemes.isp",
                old='data_axes=("wdp",),\n    loss_axes=("dp",),\n)',
                new='data_axes=("dp",),\n    loss_axes=("dp",),\n)',
            ),
        ),
        kills="ledger",
        phase="grad_sync",
        region="*",
        cause="wrong_group|missing_call|extra_call",
    ),
    Mutant(
        name="gradients-summed-over-the-tensor-group",
        stands_for="B-66, B-71: Megatron #7452-7, data-parallel sums over the default tensor group",
        modes=_DATA,
        changes=_step(_SUM_DATA, _SUM_DATA.replace("mesh.axis(axis)", 'mesh.axis("tp")')),
        kills="ledger",
        phase="grad_sync",
        region="*",
        cause="wrong_group|missing_call|extra_call|wrong_payload",
    ),
    Mutant(
        name="tokens-counted-over-the-tensor-group",
        stands_for="B-32: DeepSpeed #5555, divided by a group that shares its data",
        modes=everywhere(),
        changes=_training("[mesh.axis(axis) for axis in strategy.loss_axes]", '[mesh.axis("tp")]'),
        kills="parameter_gradients|ledger",
        phase="grad_sync",
        region="*",
        cause="extra_call|wrong_group|averaged",
    ),
    Mutant(
        name="norm-summed-over-the-data-group",
        stands_for="B-47: torchtitan #649, the norm is reduced over another group than its shards",
        modes=everywhere(),
        condition="dp>1",
        changes=(
            *_step("(rank.strategy.weight_axis, *rank.strategy.norm_axes)", '("dp", *rank.strategy.norm_axes)'),
            Change(
                module="parallel.communication.gradients", old="axis.name in places[name].axes", new="places[name].axes"
            ),
        ),
        kills="gradient_norm|replicas",
        phase="grad_sync|step",
        region="",
        cause="wrong_group|missing_call|extra_call",
    ),
    Mutant(
        name="peer-computed-as-if-alone",
        stands_for="B-71: TE #2179, the first rank of a group computed as if there were one group",
        modes=everywhere("dp>1 delivery!=local", ("tp", "tp-sp")),
        changes=(
            Change(
                module="parallel.communication.collectives",
                old="dist.broadcast(buffer, axis.ranks[0], axis.group)",
                new="dist.broadcast(buffer, 0, axis.group)",
            ),
        ),
        kills="run",
        cause="raised|desynchronised",
    ),
    Mutant(
        name="weight-groups-strided",
        stands_for="B-66: InternEvo process_group_initializer, two orders of one mesh: strided where blocks belong",
        modes={"isp": "wp>1 wdp>1"},
        changes=(_RULES, _relabelled('("wdp", case.axis_sizes["wdp"]), ("wp", case.wp)')),
        kills="groups",
        alone=True,
        phase="data|forward",
        region="|embedding",
        cause="wrong_group",
    ),
    Mutant(
        name="data-groups-of-neighbours",
        stands_for="B-71: Megatron RankGenerator, order dp-tp in place of tp-dp: tensor groups cross the nodes",
        modes=everywhere("dp>1 tp>1", TENSOR),
        changes=(
            _RULES,
            _relabelled('("dp", case.dp), ("tp", case.tp)'),
            Change(
                module="parallel.communication.mesh",
                old="return case.axis_rank(name, rank)",
                new='return rank // case.dp if name == "tp" else rank % case.dp',
            ),
        ),
        kills="groups",
        phase="data|forward",
        region="|embedding",
        cause="wrong_group",
    ),
    Mutant(
        name="order-of-ranks-not-heeded",
        stands_for="B-71: Megatron #7452-4, groups of the default rank order under another one: all numbers right",
        modes=everywhere("dp>1 tp>1", TENSOR),
        suite={"order": "dp-tp"},
        changes=(
            Change(
                module="parallel.communication.mesh",
                old="for name, groups in case.axes.items():",
                new='for name, groups in case.but(order="tp-dp").axes.items():',
            ),
            Change(
                module="parallel.communication.mesh",
                old="return case.axis_rank(name, rank)",
                new='return case.but(order="tp-dp").axis_rank(name, rank)',
            ),
        ),
        kills="groups",
        alone=True,
        phase="data|forward",
        region="|embedding",
        cause="wrong_group",
    ),
    Mutant(
        name="data-and-context-ranks-taken-for-neighbours",
        stands_for="around.md 11, B-66: the joint group of dp and cp computed for one order of ranks alone",
        modes=everywhere("", TENSOR),
        suite={"cp": 2, "seq": 48, "metric": False, "order": "cp-tp-dp"},
        changes=(
            _RULES,
            Change(
                module="parallel.communication.mesh",
                old="for name, groups in case.axes.items():",
                new='joint = RankOrder((("tp", case.tp), ("dp_cp", case.cp * case.dp))).groups("dp_cp")\n'
                '        for name, groups in {**case.axes, "dp_cp": joint}.items():',
            ),
        ),
        kills="groups",
        phase="grad_sync|loss|backward",
        region="*",
        cause="wrong_group",
    ),
    Mutant(
        name="split-that-splits-nothing",
        stands_for="B-69: ColossalAI #5903, a dead variable was split: every number right, nothing parallel",
        modes=_UNSPLIT,
        changes=(_MESH_OF_ONE,),
        kills="parallelism",
        phase="forward",
        region="*",
        cause="missing_call|not_parallel",
    ),
    Mutant(
        name="mesh-of-one-rank-for-everybody",
        stands_for="B-69: ColossalAI #5903, the size of the axis itself is dead, so that the closed form agrees",
        modes=_UNSPLIT,
        changes=(
            _MESH_OF_ONE,
            Change(
                module="parallel.communication.mesh",
                old="return case.axis_sizes[name]",
                new='return 1 if name in ("tp", "wp") else case.axis_sizes[name]',
            ),
            Change(
                module="parallel.communication.mesh",
                old="return case.axis_rank(name, rank)",
                new='return 0 if name in ("tp", "wp") else case.axis_rank(name, rank)',
            ),
        ),
        kills="parallelism",
        alone=True,
        cause="not_parallel",
    ),
    Mutant(
        name="exchanged-twice",
        stands_for="B-70, B-93: VeOmni #333, the exchange is done twice and one result thrown away",
        modes=everywhere(),
        changes=(
            Change(module="parallel.layers.linear", old=_GATHERED, new=f"region.gathered(x)\n        {_GATHERED}"),
            Change(
                module="parallel.layers.linear",
                old=_LEAVE,
                new=f"pairs.reduce_from(y.detach(), self.axis)\n            {_LEAVE}",
            ),
            Change(
                module="parallel.layers.ulysses",
                old=_EXCHANGE,
                new=f"start_all_to_all(q, axis, split_dim=_HEADS, gather_dim=_SEQUENCE).wait()\n        {_EXCHANGE}",
            ),
        ),
        kills="ledger",
        alone=True,
        phase="forward",
        region="embedding|layers.0.attention*",
        cause="extra_call",
    ),
)
