"""Bugs of a step behind the passes: sums of gradients, norm, clipping, optimizer, ZeRO, scaling, checkpoints."""

from __future__ import annotations

from suites.mutants.mutant import SPLIT, TENSOR
from suites.mutants.unseen.bug import bug

__all__ = ["STEPS"]

_STAGED = (*TENSOR, "isp")

STEPS = (
    bug(
        "norm-without-biases",
        "parallel.communication.gradients",
        ("gradients.items() if counts(name)]", 'gradients.items() if counts(name) and not name.endswith(".bias")]'),
        stands_for="a norm over the parameters that decay, biases left out",
        case="mode=tp tp=2",
        cause="the norm of the gradients leaves out those of biases",
        at=("step", ""),
    ),
    bug(
        "final-norm-not-summed",
        "parallel.schemes.tensor",
        (
            'return module.rpartition(".")[2].endswith("norm") or',
            'return (module.startswith("layers.") and module.endswith("norm")) or',
        ),
        stands_for="Megatron: a norm behind the layers without the mark of sequence parallelism",
        case="mode=tp-sp tp=2",
        cause="the final norm's gradient is left a partial sum where the sequence is split",
        at=("grad_sync", "final_norm"),
        needed="mode=tp-sp",
        modes=SPLIT,
    ),
    bug(
        "loss-in-float32",
        "parallel.communication.gradients",
        ("torch.stack([loss.double(), tokens.double()])", "torch.stack([loss.float(), tokens.float()])"),
        stands_for="a loss that is summed over ranks in a narrower dtype than it was computed in",
        case="mode=tp tp=2 dp=2",
        cause="the sum of the loss travels in float32",
        at=("loss|grad_sync", ""),
        needed="dp=2",
    ),
    bug(
        "gradients-never-cleared",
        "parallel.training.loop",
        (
            "for step in range(case.steps):\n        optimizer.zero_grad()\n",
            "for step in range(case.steps):\n        if step == 0:\n            optimizer.zero_grad()\n",
        ),
        stands_for="ML#6660's kind: gradients of former steps that stay in the buffer",
        case="mode=tp tp=2",
        cause="gradients are cleared before the first step alone, and each later step adds to them",
        at=("backward|grad_sync|step", "*"),
    ),
    bug(
        "saved-one-step-early",
        "parallel.training.loop",
        ("steps=before + case.steps)", "steps=before + step)"),
        stands_for="a checkpoint that names its last step's index where its number of steps belongs",
        case="mode=tp tp=2 save=unseen_checkpoint",
        cause="the checkpoint counts one step less than were run",
        at=("checkpoint", ""),
        needed="save=unseen_checkpoint",
    ),
    bug(
        "model-never-dropped",
        "parallel.data_parallel.gathered",
        ("if last or self._case.pp == 1:", "if self.module and (last or self._case.pp == 1):"),
        stands_for="FSDP: parameters of the root that stay gathered over the optimizer's step",
        case="mode=tp tp=1 dp=2 zero=2",
        cause="what lies outside of layers is gathered once and stale from the second step on",
        at=("forward", "embedding"),
        needed="zero=2",
        modes=TENSOR,
    ),
    bug(
        "lookups-forgotten",
        "parallel.data_parallel.buffers",
        ("if not taken or name == TABLE:", "if not taken:"),
        stands_for="fused gradient accumulation of a tied table, which embedding and head both use",
        case="mode=tp tp=2 wgrad=fused",
        cause="the tied table's gradient has the head's part and not that of the lookups",
        at=("backward|grad_sync", "embedding*"),
        needed="wgrad=fused",
        modes=TENSOR,
    ),
    bug(
        "decay-in-the-gradient",
        "parallel.training.step",
        ("return torch.optim.AdamW(", "return torch.optim.Adam("),
        stands_for="weight decay as an L2 term where a decoupled one was meant",
        case="mode=tp tp=2 optimizer=adamw",
        cause="weight decay is added to the gradient and goes through Adam's moments",
        at=("step", "*"),
        needed="optimizer=adamw",
    ),
    bug(
        "row-linears-start-large",
        "parallel.randomness.initial",
        ('_ROW = ("wo", "w2")', '_ROW = ("wo",)'),
        stands_for="Megatron's scaled initial values, which one of the two output linears misses",
        case="mode=tp tp=2 init=field",
        cause="the second linear of the MLP starts with a standard deviation that does not shrink with depth",
        at=("forward", "layers.0.mlp.w2"),
        needed="init=field",
    ),
    bug(
        "copy-by-first-chunk",
        "parallel.training.step",
        ("if rank.chunks[-1][0].copies_table:", "if rank.chunks[0][0].copies_table:"),
        stands_for="a norm that counts a tied table on both of its stages when ranks have several chunks",
        case="mode=tp tp=1 pp=2 layers=4 schedule=interleaved chunks=2",
        cause="the copy of the tied table on the last chunk counts in the norm again",
        at=("step", ""),
        needed="schedule=interleaved",
        modes=_STAGED,
    ),
    bug(
        "patience-one-longer",
        "parallel.data_parallel.loss_scale",
        ("if left <= 0 else state.value", "if left < 0 else state.value"),
        stands_for="an off-by-one in the hysteresis of a dynamic loss scale",
        case="mode=tp tp=2 dtype=float16 master=float32 scaler=dynamic steps=3",
        cause="the loss scale backs off one infinite step later than its hysteresis says",
        at=("step", ""),
        needed="scaler=dynamic steps=3",
        modes=_STAGED,
    ),
    bug(
        "replicas-left-alone",
        "parallel.data_parallel.gathered",
        ("if self._case.shard else None)", "if self._case.shard and not self._case.no_sync else None)"),
        stands_for="verl#7493's kind: HSDP whose sum over replicas is skipped under a flag",
        case="mode=tp tp=1 dp=4 zero=2 shard=2 no_sync=true",
        cause="with no_sync the shards of gradients are not summed over the replicas",
        at=("grad_sync", "*"),
        needed="dp=4 shard=2 no_sync=true",
        modes=TENSOR,
    ),
    bug(
        "rows-cut-evenly",
        "parallel.data_parallel.gathered",
        (
            "height = padded_rows(gradient.shape[0], ranks)\n"
            "            for index, rows in enumerate(gradient.split(height)):\n",
            "for index, rows in enumerate(gradient.tensor_split(ranks)):\n",
        ),
        stands_for="ZeRO: gradients cut as torch.tensor_split does over parameters cut as torch.chunk does",
        case="mode=tp tp=1 dp=3 zero=2",
        cause="rows of gradients that ranks cannot share evenly go to other ranks than the parameters' rows",
        at=("backward", "layers.1*"),
        needed="zero=2 dp=3",
        modes=TENSOR,
    ),
    bug(
        "gathered-before-rounding",
        "parallel.data_parallel.buffers",
        (
            '            for name, tensor in rank.updated.items() if self._case.master != "none" else ():\n'
            "                own = _part(self._model[name], self._own[name]) if self._sharded else self._model[name]\n"
            "                own.copy_(tensor)\n"
            "            for under in self._under if self._sharded else ():\n"
            "                self._gather(under.bucket)\n",
            "            for under in self._under if self._sharded else ():\n"
            "                self._gather(under.bucket)\n"
            '            for name, tensor in rank.updated.items() if self._case.master != "none" else ():\n'
            "                own = _part(self._model[name], self._own[name]) if self._sharded else self._model[name]\n"
            "                own.copy_(tensor)\n",
        ),
        stands_for="ZeRO-1: the parameters' gather issued before the masters are rounded into them",
        case="mode=tp tp=1 dp=2 zero=1 dtype=bfloat16 master=float32",
        cause="parameters are gathered before the stepped masters are copied into them, so other ranks keep old ones",
        at=("step|forward", "*"),
        needed="dp=2 zero=1 master=float32",
        modes=_STAGED,
    ),
    bug(
        "copy-not-clipped",
        "parallel.training.loop",
        (
            "sync.clip(gradients.values(), norm, case.clip)",
            'copied = "embedding.tokens.weight" if rank.chunks[-1][0].copies_table else ""\n'
            "            sync.clip([one for name, one in gradients.items() if name != copied], norm, case.clip)",
        ),
        stands_for="a tied table's copy that is left out of clipping as it is left out of the norm",
        case="mode=tp tp=1 pp=2 clip=0.1",
        cause="the last stage's copy of the tied table is stepped by a gradient that was not clipped",
        at=("step", "embedding*|head"),
        needed="clip=0.1 pp=2",
        modes=_STAGED,
    ),
)
