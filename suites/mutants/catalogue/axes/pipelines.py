"""Stages of a pipeline: messages, sums over stages, the tied token table (bugs.md, around.md 13 and 19)."""

from __future__ import annotations

from suites.mutants.mutant import Change, Mutant, Words, everywhere

__all__ = ["PIPELINES"]

_STAGES = everywhere("", ("tp", "tp-sp"))
STAGES: Words = {"pp": 2, "layers": 3, "first_layers": 2, "metric": False, "lr": 0.1}
TIED: Words = {**STAGES, "family": "gpt"}
GPIPE: Words = {**STAGES, "schedule": "gpipe"}
"""What the properties of pipelines fix (tests/parallel/pipeline)."""
_SENT = "return self._outputs[key].detach().contiguous()"
_SUM = "self._outputs[key] = summed if"
_SECOND = "layers.2.*"
"""Modules of the second stage's layer."""


def _execution(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.pipeline.execution", old=old, new=new),)


def _scheme(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.pipeline.scheme", old=old, new=new),)


PIPELINES = (
    Mutant(
        name="stages-scale-missing",
        stands_for="picotron: pipeline gradients are not divided by the number of micro-batches (pp-scale-missing)",
        modes=_STAGES,
        suite=STAGES,
        changes=_execution(
            _SUM,
            "summed = summed * rank.case.micro\n        self._outputs[key] = summed if",
        ),
        kills="activation_gradients",
        phase="backward",
        region="head|",
        cause="constant_factor",
    ),
    Mutant(
        name="activation-of-the-first-micro-batch",
        stands_for="a send buffer that is filled again before it is sent: the next stage gets an activation twice",
        modes=_STAGES,
        suite=GPIPE,
        changes=_execution(_SENT, _SENT.replace("key", "min(self._outputs)")),
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
            "self._outputs.pop(key), ",
            "self._outputs.pop(key if self.rank.chunks[0][0].last else (self.rank.case.micro - 1 - key[0], key[1])), ",
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
        name="tied-table-not-summed",
        stands_for="tied-no-sync (around.md 13.5): no sum of the token table's gradient over the embedding group",
        modes=_STAGES,
        suite=TIED,
        changes=_scheme(
            'sync.sum_gradients([rank.step.partial(rank)[TABLE]], rank.mesh.axis("embedding"))',
            "rank.gradients()",
        ),
        kills="replicas",
        phase="grad_sync",
        region="*",
        cause="missing_call|not_summed",
    ),
    Mutant(
        name="tied-table-counted-twice",
        stands_for="the last stage's copy of the token table is not marked shared, so that the norm has it twice",
        modes=_STAGES,
        suite=TIED,
        changes=(Change(module="parallel.step", old="del gradients[TABLE]", new="pass"),),
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
)
