"""Held back: the loss, the optimizer, the metric, and calls that change no number."""

from __future__ import annotations

from suites.mutants.catalogue.model.norms_and_clip import CLIPPED
from suites.mutants.catalogue.training.optimizer_and_loop import ADAMW
from suites.mutants.mutant import TENSOR, Change, Mutant, everywhere

__all__ = ["MUTANTS"]

_INTERNEVO = ("mtp", "msp", "fsp", "isp")
_LOSS = everywhere("head=parallel", TENSOR) | {"isp": "head=exchange"}


def _one(module: str, old: str, new: str) -> tuple[Change, ...]:
    return (Change(module=f"parallel.{module}", old=old, new=new),)


MUTANTS = (
    Mutant(
        name="smoothing-over-all-classes",
        stands_for="label smoothing spread over V classes instead of the V-1 others (PyTorch against Megatron)",
        modes=everywhere(),
        condition="label_smoothing>0",
        changes=_one("layers.loss", "spread = smoothing / (vocab - 1) if", "spread = smoothing / vocab if"),
        kills="forward",
        phase="loss|",
        region="",
        cause="smoothing_over_all",
    ),
    Mutant(
        name="smoothing-without-its-gradient",
        stands_for="Megatron #7452-1, in backward: the smoothing term is in the loss and not in its gradient",
        modes=everywhere(),
        condition="label_smoothing>0",
        changes=_one(
            "layers.loss", "slope[..., : ctx.real] -= ctx.spread\n", "slope[..., : ctx.real] -= 0 * ctx.spread\n"
        ),
        kills="activation_gradients|parameter_gradients",
        phase="backward|loss",
        region="head|final_norm|",
        cause="smoothing_missing",
    ),
    Mutant(
        name="loss-in-float32",
        stands_for="logits always cast to float32 before the loss (nanotron, Megatron fp32 cross entropy)",
        modes=_LOSS,
        changes=_one(
            "layers.loss", "x = logits.to(wide(logits.dtype), copy=True)", "x = logits.to(torch.float32, copy=True)"
        ),
        kills="ledger|forward",
        phase="loss|backward",
        region="|head",
        cause="wrong_payload|other_dtype",
    ),
    Mutant(
        name="embedding-scaled-by-width",
        stands_for="Gemma's embedding scale applied to a model that has none",
        modes=everywhere("positions=rope"),
        changes=_one(
            "model.transformer",
            "x = self.embedding(batch.tokens, batch.positions)",
            "x = self.embedding(batch.tokens, batch.positions) * self.case.hidden**0.5",
        ),
        kills="activations|forward",
        phase="forward",
        region="embedding|layers.0.attention_norm|layers.0*",
        cause="constant_factor",
    ),
    Mutant(
        name="epsilon-of-the-clip-too-large",
        stands_for="clip denominators with another epsilon (DeepSpeed 1e-6 against 1e-2)",
        modes=everywhere(),
        suite=CLIPPED,
        changes=_one(
            "communication.gradients",
            "factor = (largest / (total + 1e-6)).clamp(max=1.0)",
            "factor = (largest / (total + 1e-2)).clamp(max=1.0)",
        ),
        kills="update",
        phase="step",
        region="*",
    ),
    Mutant(
        name="clipped-by-value",
        stands_for="clip_grad_value_ for clip_grad_norm_",
        modes=everywhere(),
        suite=CLIPPED,
        changes=_one("communication.gradients", "gradient.mul_(factor)", "gradient.clamp_(-largest, largest)"),
        kills="update",
        phase="step",
        region="*",
        cause="clipped_otherwise",
    ),
    Mutant(
        name="clipped-after-the-step",
        stands_for="the clip runs after the optimizer (order of hooks)",
        modes=everywhere(),
        suite=CLIPPED,
        changes=_one(
            "training.loop",
            "sync.clip(gradients.values(), norm, case.clip)\n        optimizer.step()",
            "optimizer.step()\n        sync.clip(gradients.values(), norm, case.clip)",
        ),
        kills="update",
        phase="step",
        region="*",
        cause="unclipped",
    ),
    Mutant(
        name="half-the-learning-rate",
        stands_for="a warm-up that nobody asked for",
        modes=everywhere(),
        changes=_one(
            "training.step", "torch.optim.SGD(parameters, lr=case.lr)", "torch.optim.SGD(parameters, lr=case.lr / 2)"
        ),
        kills="update",
        phase="step",
        region="*",
        cause="constant_factor",
    ),
    Mutant(
        name="learning-rate-times-data-ranks",
        stands_for="the linear scaling rule applied twice",
        modes=everywhere(),
        condition="dp>1",
        changes=_one(
            "training.step",
            "torch.optim.SGD(parameters, lr=case.lr)",
            "torch.optim.SGD(parameters, lr=case.lr * case.dp)",
        ),
        kills="update",
        phase="step",
        region="*",
        cause="summed_twice|constant_factor",
    ),
    Mutant(
        name="learning-rate-falls",
        stands_for="a schedule that steps per optimizer step although none was asked for",
        modes=everywhere(),
        changes=_one(
            "training.loop",
            "optimizer.step()",
            'optimizer.step()\n        for group in optimizer.param_groups:\n            group["lr"] *= 0.1',
        ),
        kills="update",
        phase="step",
        region="*",
        cause="constant_factor",
    ),
    Mutant(
        name="another-second-moment",
        stands_for="beta2 = 0.95 of large models for the default 0.999",
        modes=everywhere(),
        suite=ADAMW,
        changes=_one(
            "training.step",
            "torch.optim.AdamW(parameters, lr=case.lr, weight_decay=_WEIGHT_DECAY)",
            "torch.optim.AdamW(parameters, lr=case.lr, weight_decay=_WEIGHT_DECAY, betas=(0.9, 0.95))",
        ),
        kills="update",
        phase="step",
        region="*",
        cause="other_beta",
    ),
    Mutant(
        name="ten-times-the-decay",
        stands_for="weight decay 0.1 for 0.01",
        modes=everywhere(),
        suite=ADAMW,
        changes=_one("training.step", "_WEIGHT_DECAY = 0.01", "_WEIGHT_DECAY = 0.1"),
        kills="update",
        phase="step",
        region="*",
        cause="decay_added",
    ),
    Mutant(
        name="biases-and-norms-never-updated",
        stands_for="a parameter group without the one-dimensional parameters (no-decay groups dropped)",
        modes=everywhere(),
        changes=_one(
            "training.step", "list(rank.updated.values())", "[p for p in rank.updated.values() if p.dim() > 1]"
        ),
        kills="update",
        phase="step",
        region="*",
        cause="never_updated",
    ),
    Mutant(
        name="gradients-through-bfloat16",
        stands_for="a compression hook left on: gradients travel and are summed in bfloat16",
        modes=everywhere("dp>1", TENSOR) | {"isp": "wdp>1"},
        changes=_one(
            "communication.gradients",
            "torch.cat([gradient.flatten() for gradient in group])",
            "torch.cat([gradient.flatten().bfloat16() for gradient in group])",
        ),
        kills="ledger|parameter_gradients",
        phase="grad_sync|backward",
        region="*",
        cause="wrong_payload|other_dtype",
    ),
    Mutant(
        name="metric-of-the-last-micro-batch",
        stands_for="a metric that is assigned instead of added",
        modes=everywhere("metric=true", _INTERNEVO),
        changes=_one(
            "layers.metric",
            "self.total = measured if self.total is None else self.total + measured",
            "self.total = measured",
        ),
        kills="forward",
        phase="metric|loss",
        region="",
        cause="micro_missing",
    ),
    Mutant(
        name="nothing-is-ever-right",
        stands_for="a strict comparison with the maximum itself",
        modes=everywhere("metric=true", _INTERNEVO),
        changes=_one("layers.metric", "right = (((hit >= largest)", "right = (((hit > largest)"),
        kills="forward",
        phase="metric|loss",
        region="",
        cause="zero",
    ),
    Mutant(
        name="loss-summed-in-two-calls-when-fused",
        stands_for="InternEvo's fused and unfused losses, chosen the other way round",
        modes=_LOSS,
        changes=_one("layers.loss", "    if fused:\n", "    if not fused:\n"),
        kills="ledger",
        phase="loss",
        region="",
        cause="wrong_payload|missing_call|extra_call",
    ),
    Mutant(
        name="loss-summed-a-second-time-for-the-log",
        stands_for="a logger that reduces the loss again and throws it away",
        modes=everywhere(),
        condition="dp>1",
        changes=_one(
            "training.loop",
            "loss, tokens = sync.sum_scalars(",
            "sync.sum_scalars(loss, tokens, [mesh.axis(axis) for axis in strategy.loss_axes])\n"
            "    loss, tokens = sync.sum_scalars(",
        ),
        kills="ledger",
        phase="grad_sync",
        region="",
        cause="extra_call",
    ),
    Mutant(
        name="groups-of-one-are-not-bypassed",
        stands_for="calls issued in groups of one rank (Megatron issues some, and they cost launches)",
        modes=everywhere(),
        condition="dp=1",
        changes=_one(
            "communication.gradients", "pair = all_reduce(pair, axis)", "dist.all_reduce(pair, group=axis.group)"
        )
        + _one(
            "communication.gradients",
            "import torch\nfrom torch import Tensor",
            "import torch\nimport torch.distributed as dist\nfrom torch import Tensor",
        ),
        kills="ledger",
        phase="grad_sync",
        region="",
        cause="extra_call",
    ),
    Mutant(
        name="first-layer-is-not-recomputed",
        stands_for="fractional checkpointing that leaves a layer out (InternEvo checkpoint fractions)",
        modes=everywhere("recompute=full", TENSOR),
        changes=_one(
            "model.transformer",
            "x = computed_later_again(through, x, ",
            "x = through(x) if unit[0] == 0 else computed_later_again(through, x, ",
        ),
        kills="ledger",
        phase="recompute|backward",
        region="layers.0*",
        cause="missing_call",
    ),
    Mutant(
        name="gradient-of-the-split-not-gathered",
        stands_for="the scatter into sequence slices has no all-gather in backward (torchtitan #4054 mirrored)",
        modes=everywhere("positions=learned", ("tp-sp", "msp", "fsp")),
        changes=_one(
            "communication.pairs",
            "lambda y: own_slice(y, axis, dim=dim), lambda grad: _all_gather(grad, axis, dim=dim))",
            "lambda y: own_slice(y, axis, dim=dim), lambda grad: torch.cat([grad] * axis.size, dim))",
        ),
        kills="ledger|parameter_gradients|replicas",
        phase="backward|grad_sync",
        region="embedding|embedding.*",
        cause="missing_call",
    ),
)
"""Steps, metric, traffic."""
