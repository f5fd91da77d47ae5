"""Buckets, sharded optimizers and parameters, masters and loss scales (bugs.md 6h, 6i; around.md 15 and 19)."""

from __future__ import annotations

from suites.mutants.mutant import Change, Mutant, Words, everywhere

__all__ = ["DATA_PARALLEL"]

_DATA = everywhere("dp>1", ("tp", "tp-sp"))
BUCKETS: Words = {"zero": 0, "bucket": 700, "lr": 0.1}
SPLIT_STATES: Words = {"zero": 1, "bucket": 700, "lr": 0.1}
ROWS: Words = {"zero": 3, "lr": 0.1}
REPLICAS: Words = {"zero": 2, "shard": 1, "lr": 0.1}
MASTERS: Words = {"zero": 1, "dtype": "bfloat16", "master": "float32", "lr": 1.0}
SCALED: Words = {
    "dtype": "float16",
    "master": "float32",
    "scaler": "static",
    "loss_scale": 8.0,
    "lr": 1.0,
    "clip": 0.05,
}
"""What the properties of data parallelism fix (tests/parallel/data_parallel)."""
_ADDED = "if name in self._begun:\n                self._views[name].add_(parameter.grad)"
_OWN = "own = under.bucket.owned(self._axis.rank, self._axis.size)"
_SYNCED = "backward|grad_sync"
_LATER = "forward|step|grad_sync|backward|loss"


def _change(module: str, old: str, new: str) -> Change:
    return Change(module=f"parallel.{module}", old=old, new=new)


DATA_PARALLEL = (
    Mutant(
        name="bucket-not-awaited",
        stands_for="B-90: DeepSpeed #5606, the handle of one bucket's reduction is dropped",
        modes=_DATA,
        condition="overlap=true",
        suite=SPLIT_STATES,
        changes=(_change("data_parallel.buffers", "under.pending.wait(), None, 0", "under.pending.finish(), None, 0"),),
        kills="waits",
        phase="backward|grad_sync",
        region="*",
        cause="not_waited",
    ),
    Mutant(
        name="bucket-not-zeroed",
        stands_for="B-91: Megatron #4609, the gradient buffer is reused and not zeroed",
        modes=_DATA,
        suite=BUCKETS,
        changes=(_change("data_parallel.buffers", _ADDED, _ADDED.replace("if name in self._begun:", "if True:")),),
        kills="gradient_norm|update",
        phase=_LATER,
        region="*",
        cause="not_zeroed|step_missing|constant_factor",
    ),
    Mutant(
        name="bucket-summed-before-the-last-micro-batch",
        stands_for="B-89: DeepSpeed #7985, the last micro-batch is added after the reduction",
        modes=_DATA,
        condition="micro>1",
        suite=BUCKETS,
        changes=(
            _change(
                "data_parallel.buffers",
                "if self._came[name] == self._case.micro and not",
                "if self._came[name] == self._case.micro - 1 and not",
            ),
        ),
        kills="replicas",
        phase=_LATER,
        region="*",
        cause="unequal_shares|micro_missing|not_summed|wrong_place|summed_twice",
    ),
    Mutant(
        name="last-bucket-forgotten",
        stands_for="B-115: TTrace's list, a ZeRO update that leaves out what lies in the last bucket",
        modes=_DATA,
        suite=SPLIT_STATES,
        changes=(
            _change(
                "data_parallel.buffers",
                "for under in self._under:\n            assert under.pending is not None",
                "for under in self._under[:-1]:\n            assert under.pending is not None",
            ),
        ),
        kills="parameter_gradients",
        phase=_SYNCED,
        region="*",
        cause="not_summed|micro_missing|missing_call|zero|unequal_shares",
    ),
    Mutant(
        name="range-of-the-next-rank",
        stands_for="B-67: DeepSpeed #8158, a buffer is walked by other offsets than it was made with",
        modes=_DATA,
        suite=SPLIT_STATES,
        changes=(
            _change(
                "data_parallel.buffers",
                _OWN,
                "own = under.bucket.owned((self._axis.rank + 1) % self._axis.size, self._axis.size)",
            ),
        ),
        kills="parameter_gradients",
        phase=_SYNCED,
        region="*",
        cause="shifted_shard|other_shard|not_summed|one_shard|flat_offset",
    ),
    Mutant(
        name="parameters-gathered-before-the-update",
        stands_for="B-92: InternEvo bb20142, parameters are sent before the optimizer has stepped",
        modes=_DATA,
        suite=SPLIT_STATES,
        changes=(
            _change(
                "training.loop",
                "optimizer.step()\n        rank.step.afterwards(rank)",
                "rank.step.afterwards(rank)\n        optimizer.step()",
            ),
        ),
        kills="replicas",
        phase="step|grad_sync|forward",
        region="*",
        cause="not_summed|one_shard|never_updated|wrong_place|step_missing|layout|replicas_drift",
    ),
    Mutant(
        name="masters-not-rounded-back",
        stands_for="B-106: accelerate #2665, the optimizer steps copies that the model never sees",
        modes=_DATA,
        suite=MASTERS,
        changes=(_change("data_parallel.buffers", "own.copy_(tensor)", "pass"),),
        kills="forward",
        phase="forward|loss|step",
        region="*",
        cause="never_updated|stale|untied",
    ),
    Mutant(
        name="norm-of-the-own-part",
        stands_for="VeOmni #862: the norm of a sharded optimizer over too few ranks",
        modes=_DATA,
        suite={**SPLIT_STATES, "clip": 0.05},
        changes=(_change("data_parallel.scheme", "(*strategy.norm_axes, shard_axis(case)) if case.zero else", ""),),
        kills="ledger",
        phase="grad_sync",
        region="",
        cause="missing_call|norm_counts_few",
    ),
    Mutant(
        name="rows-cut-without-the-rest",
        stands_for="torchtitan #4593: shards of uneven rows whose places are computed as if they were even",
        modes=_DATA,
        suite=ROWS,
        changes=(
            _change(
                "data_parallel.gathered",
                "height = padded_rows(gradient.shape[0], ranks)",
                "height = max(1, gradient.shape[0] // ranks)\n            gradient = gradient[: height * ranks]",
            ),
        ),
        kills="parameter_gradients",
        phase=_SYNCED,
        region="*",
        cause="shifted_shard|rows_permuted|flat_offset|one_shard|other_shard",
    ),
    Mutant(
        name="rows-averaged",
        stands_for="B-31: a reduce-scatter that averages where the gradients are sums",
        modes=_DATA,
        suite=ROWS,
        changes=(
            _change(
                "data_parallel.gathered",
                "own = reduce_scatter(buffer.flatten(), self._axis, dim=0)",
                'own = reduce_scatter(buffer.flatten(), self._axis, dim=0, op="avg")',
            ),
        ),
        kills="parameter_gradients",
        phase=_SYNCED,
        region="*",
        cause="averaged|wrong_op",
    ),
    Mutant(
        name="rows-of-the-step-before-kept",
        stands_for="B-91: Megatron c2c36f77cf, gradients of a step are added to those of the one before",
        modes=_DATA,
        suite=ROWS,
        changes=(
            _change(
                "data_parallel.gathered",
                "            self._sum = all_reduce(self._sum, replicas)\n        self._came = 0",
                "            self._sum = all_reduce(self._sum, replicas)",
            ),
        ),
        kills="gradient_norm|update",
        phase=_LATER,
        region="*",
        cause="not_zeroed|constant_factor|step_missing",
    ),
    Mutant(
        name="replicas-not-summed",
        stands_for="verl #7493: fsdp_size=1 switches the synchronisation of gradients off",
        modes=_DATA,
        suite=REPLICAS,
        changes=(_change("data_parallel.gathered", "if replicas is not None:", "if replicas is None:"),),
        kills="replicas",
        phase="grad_sync",
        region="*",
        cause="not_summed|missing_call|raised",
    ),
    Mutant(
        name="unscaled-after-the-clip",
        stands_for="B-42: DeepSpeed #7839, the scale is taken off at another place than it was put on for",
        modes=_DATA,
        suite=SCALED,
        changes=(
            _change("data_parallel.scaling", "gradient.div_(self.value)", "pass"),
            _change(
                "training.loop",
                "sync.clip(gradients.values(), norm, case.clip)",
                "sync.clip(gradients.values(), norm, case.clip)\n            "
                "for gradient in gradients.values() if scale else ():\n                gradient.div_(scale)",
            ),
        ),
        kills="gradient_norm",
        phase="grad_sync|backward|step",
        region="*",
        cause="constant_factor",
    ),
    Mutant(
        name="infinity-found-by-one-rank",
        stands_for="around.md 15.4: found_inf is not reduced, so that ranks skip different steps",
        modes=_DATA,
        suite=SCALED,
        changes=(
            _change(
                "data_parallel.scaling",
                "for axis in (rank.strategy.weight_axis, *rank.strategy.norm_axes):",
                "for axis in ():",
            ),
        ),
        kills="ledger",
        alone=True,
        phase="grad_sync",
        region="",
        cause="missing_call",
    ),
    Mutant(
        name="buckets-over-dp-of-gathered-weights",
        stands_for="B-35: Megatron #906 in isp, gradients are reduced over dp where wdp holds the same rows",
        modes={"isp": "wp!=tp wdp>1"},
        suite={**BUCKETS, "fuse_weights": False},
        changes=(_change("data_parallel.buffers", "rank.mesh.axis(rank.case.data_axis)", 'rank.mesh.axis("dp")'),),
        kills="ledger",
        phase=_SYNCED,
        region="*",
        cause="wrong_group|missing_call|extra_call",
    ),
)
