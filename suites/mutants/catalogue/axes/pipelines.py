"""Stages of a pipeline: messages, sums over stages, the tied token table (bugs.md, around.md 13 and 19)."""

from __future__ import annotations

from suites.mutants.mutant import Change, Mutant, Words, everywhere

__all__ = ["PIPELINES"]

_STAGES = everywhere("", ("tp", "tp-sp"))
STAGES: Words = {"pp": 2, "layers": 3, "first_layers": 2, "metric": False, "lr": 0.1}
TIED: Words = {**STAGES, "family": "gpt"}
GPIPE: Words = {**STAGES, "schedule": "gpipe"}
CHUNKS: Words = {
    "pp": 2,
    "schedule": "interleaved",
    "chunks": 2,
    "layers": 4,
    "micro": 4,
    "metric": False,
    "lr": 0.1,
}
SCALED: Words = {
    **STAGES,
    "dtype": "float16",
    "master": "float32",
    "scaler": "static",
    "loss_scale": 8.0,
    "lr": 1.0,
    "clip": 0.05,
}
"""What the properties of pipelines fix (tests/parallel/pipeline)."""
_SENT = "return self.outputs[key].detach().contiguous()"
_SECOND = "layers.2.*"
"""Modules of the second stage's layer."""


def _execution(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.pipeline.execution", old=old, new=new),)


def _scheme(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.pipeline.scheme", old=old, new=new),)


PIPELINES = (
    Mutant(
        name="activation-of-the-first-micro-batch",
        stands_for="around.md 13.4: a buffer is filled again before it is sent, so that the next stage gets it twice",
        modes=_STAGES,
        suite=GPIPE,
        changes=_execution(_SENT, _SENT.replace("key", "min(self.outputs)")),
        kills="forward",
        phase="forward",
        region="",
        cause="micro_repeated",
    ),
    Mutant(
        name="gradients-meet-other-micro-batches",
        stands_for="PP1 (around.md 13.4): messages between two ranks match by order, and these two orders differ",
        modes=_STAGES,
        suite=GPIPE,
        condition="micro>1",
        changes=_execution(
            "self.outputs.pop(key), ",
            "self.outputs.pop(key if self.rank.chunks[0][0].last else (self.rank.case.micro - 1 - key[0], key[1])), ",
        ),
        kills="activation_gradients",
        phase="backward",
        region=_SECOND,
        cause="",
    ),
    Mutant(
        name="labels-of-the-next-micro-batch",
        stands_for="B-85: an iterator that two stages share hands each of them other micro-batches",
        modes=_STAGES,
        suite=STAGES,
        condition="micro>1",
        changes=_execution(
            "deliver(rank.case, rank.mesh, self.step, micro, rank.device, stage=stage)",
            "deliver(rank.case, rank.mesh, self.step, (micro + stage.index) % rank.case.micro, rank.device,"
            " stage=stage)",
        ),
        kills="activation_gradients",
        phase="loss",
        region="",
        cause="",
    ),
    Mutant(
        name="tied-table-counted-twice",
        stands_for="around.md 13.5: the last stage's copy of a tied table is not marked `shared`, so it counts twice",
        modes=_STAGES,
        suite=TIED,
        condition="tied=true",
        changes=(Change(module="parallel.training.step", old="del gradients[TABLE]", new="pass"),),
        kills="gradient_norm",
        phase="grad_sync",
        region="",
        cause="norm_counts_replicas",
    ),
    Mutant(
        name="norm-of-one-stage",
        stands_for="B-47: torchtitan #649, the gradient norm is not reduced over the stages (pp-norm-local)",
        modes=_STAGES,
        suite=STAGES,
        changes=_scheme('norm_axes=(*strategy.norm_axes, "pp")', "norm_axes=strategy.norm_axes"),
        kills="gradient_norm|replicas",
        phase="grad_sync",
        region="",
        cause="missing_call",
    ),
    Mutant(
        name="tokens-of-the-last-stage-alone",
        stands_for="torchtitan #2972: stages before the last divide by another count of tokens",
        modes=_STAGES,
        suite=STAGES,
        changes=_scheme('loss_axes=(*strategy.loss_axes, "pp")', "loss_axes=strategy.loss_axes"),
        kills="tokens|replicas",
        phase="grad_sync|loss",
        region="*",
        cause="nan",
    ),
    Mutant(
        name="chunks-of-consecutive-layers",
        stands_for="around.md 11.3: chunk k of rank r holds the layers behind those of chunk k-1 of the same rank",
        modes=_STAGES,
        suite=CHUNKS,
        changes=(
            Change(
                module="parallel.schedules.stages",
                old="group.layers(case.layers, rank, chunk, ",
                new="group.layers(case.layers, *reversed(divmod(rank * case.chunks + chunk, case.pp)), ",
            ),
        ),
        kills="activations",
        phase="forward",
        region="layers.?.*",
        cause="",
    ),
    Mutant(
        name="accumulated-gradients-divided-again",
        stands_for="B-38: torchtitan #1732, what is accumulated is divided by the micro-batches at every call",
        modes=_STAGES,
        suite=STAGES,
        condition="micro>1",
        changes=_execution(
            "self._gradients.pop(key, None))",
            "self._gradients.pop(key, None))\n        for parameter in self.rank.parameters.values():\n"
            "            if parameter.grad is not None:\n                parameter.grad /= self.rank.case.micro",
        ),
        kills="parameter_gradients",
        phase="backward|grad_sync",
        region="*",
        cause="unequal_shares",
    ),
    Mutant(
        name="peer-of-the-first-pipeline",
        stands_for="B-71: TE #2179, the neighbour's place in its group is taken for its global rank",
        modes=_STAGES,
        suite=STAGES,
        changes=_execution("axis.ranks[peer(pipeline, message)]", "peer(pipeline, message)"),
        kills="run",
        phase="",
        region="",
        cause="raised",
    ),
    Mutant(
        name="received-and-not-awaited",
        stands_for="around.md 13.4: messages are used before they are there",
        modes=_STAGES,
        suite=STAGES,
        changes=_execution("work.wait()", "pass"),
        kills="run",
        phase="",
        region="",
        cause="raised",
    ),
    Mutant(
        name="loss-of-the-last-stage-not-scaled",
        stands_for="around.md 13.5: the loss scale multiplies on the last stage; all stages take it off",
        modes=_STAGES,
        suite=SCALED,
        changes=_execution(
            "summed if rank.step.loss_scale is None else rank.step.loss_scale.scaled(summed)",
            "summed",
        ),
        kills="activation_gradients",
        phase="backward",
        region="head",
        cause="constant_factor",
    ),
    Mutant(
        name="infinity-found-by-one-stage",
        stands_for="around.md 15.2: found_inf over the ranks of one stage, so that stages skip other steps",
        modes=_STAGES,
        suite=SCALED,
        changes=(
            Change(
                module="parallel.data_parallel.scaling",
                old="*rank.strategy.norm_axes):",
                new="*(axis for axis in rank.strategy.norm_axes if axis != 'pp')):",
            ),
        ),
        kills="ledger",
        phase="grad_sync",
        region="",
        cause="missing_call",
    ),
    Mutant(
        name="weights-of-another-chunk-gathered-ahead",
        stands_for="InternEvo keeps a prefetch state a chunk: with one for all, backward begins with the chunk before",
        modes={"isp": "overlap=true"},
        suite=CHUNKS,
        changes=(
            Change(
                module="parallel.schemes.weight_parallel",
                old="for stage in own_stages for one in [Gathers(weights, plan)]",
                new="for one in [Gathers(weights, plan)] for stage in own_stages",
            ),
        ),
        kills="ledger",
        phase="forward|backward",
        region="layers.*",
        cause="not_waited",
    ),
    Mutant(
        name="last-layer-of-a-stage-gathers-ahead",
        stands_for="modes.md 3.6: behind the last layer nothing is left to gather, and the first is gathered once more",
        modes={"isp": "overlap=true"},
        suite=STAGES,
        changes=(
            Change(
                module="parallel.weights.prefetch",
                old="self._start(self._blocks.get(seat.block + 1, []))",
                new="self._start(self._blocks.get(seat.block + 1, self._blocks[min(self._blocks)]))",
            ),
        ),
        kills="ledger",
        phase="forward|backward",
        region="layers.*",
        cause="not_waited",
    ),
    Mutant(
        name="recomputed-layers-counted-over-all-stages",
        stands_for="InternEvo counts them in every chunk (ckpt_block_num), and not in the whole model",
        modes={"isp": "overlap=true fuse_weights=false"},
        suite={**STAGES, "recompute": "full", "recompute_method": "block"},
        changes=(
            Change(
                module="parallel.schemes.weight_parallel",
                old="recompute=computed_again(case))",
                new="recompute=range(case.recompute_layers))",
            ),
        ),
        kills="ledger",
        phase="recompute|backward",
        region="layers.*",
        cause="extra_call",
    ),
)
