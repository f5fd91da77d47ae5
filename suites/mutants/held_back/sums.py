"""Held back: sums, factors and collectives that are left out, doubled or done otherwise."""

from __future__ import annotations

from suites.mutants.mutant import SPLIT, TENSOR, WHOLE, Change, Mutant, everywhere

__all__ = ["MUTANTS"]

_GRADIENTS = "backward|grad_sync"


def _one(module: str, old: str, new: str) -> tuple[Change, ...]:
    return (Change(module=f"parallel.{module}", old=old, new=new),)


MUTANTS = (
    Mutant(
        name="input-gradient-reduced-only-with-overlap",
        stands_for="InternEvo 432bd5e, torchtitan #1878: the path without overlap forgets the sum",
        modes=everywhere("overlap=false", WHOLE),
        changes=_one(
            "layers.linear",
            "reduced = region.start_reduce(grad @ weight, overlap=region.overlap and wants_weight)",
            "overlap = region.overlap\n            reduced = Pending(None, lambda: grad @ weight)\n"
            "            if overlap:\n"
            "                reduced = region.start_reduce(grad @ weight, overlap=wants_weight)",
        ),
        kills="ledger|activation_gradients|parameter_gradients|replicas",
        phase="backward",
        region="head|final_norm|",
        cause="missing_call|not_summed",
    ),
    Mutant(
        name="row-outputs-averaged",
        stands_for="reduce-scatter with AVG where partial sums are added",
        modes=everywhere("", SPLIT),
        changes=_one(
            "communication.pairs",
            "lambda y: _reduce_scatter(y, axis, dim=dim), lambda grad: _all_gather(grad, axis, dim=dim))",
            'lambda y: _reduce_scatter(y, axis, dim=dim, op="avg"), lambda grad: _all_gather(grad, axis, dim=dim))',
        ),
        kills="ledger|forward",
        phase="forward",
        region="embedding|layers.0.attention.wo",
        cause="wrong_op|averaged",
    ),
    Mutant(
        name="bias-gradient-is-a-mean",
        stands_for="a bias gradient averaged over tokens where the loss is already a sum",
        modes=everywhere(),
        condition="bias=true",
        changes=(
            Change(
                module="parallel.layers.linear",
                old="grad_bias = grad.flatten(0, -2).sum(0)",
                new="grad_bias = grad.flatten(0, -2).mean(0)",
            ),
            Change(
                module="parallel.weights.linear",
                old="reduced.append(supply.reduce(rows.sum(0)))",
                new="reduced.append(supply.reduce(rows.mean(0)))",
            ),
        ),
        kills="parameter_gradients",
        phase=_GRADIENTS,
        region="layers.*",
        cause="constant_factor|averaged",
    ),
    Mutant(
        name="bias-of-the-first-rank-only",
        stands_for="the bias is added on rank 0 alone, as is right before a sum, but after it",
        modes=everywhere("bias=true", WHOLE),
        changes=_one(
            "layers.linear",
            "return y if self.bias is None else y + self.bias",
            "return y if self.bias is None or self.region.axis.rank else y + self.bias",
        ),
        kills="replicas|merge|activations|forward",
        phase="forward",
        region="layers.0.attention.wo|layers.0.attention",
        cause="bias_missing|one_shard",
    ),
    Mutant(
        name="data-sum-leaves-out-the-last-gradient",
        stands_for="bucket borders: the last gradient of a bucket is reduced and not copied back (DDP bucket views)",
        modes=everywhere("dp>1", TENSOR) | {"isp": "wdp>1"},
        changes=_one(
            "communication.gradients",
            "for gradient, part in zip(group, summed.split([gradient.numel() for gradient in group]), strict=True):",
            "parts = summed.split([gradient.numel() for gradient in group])\n"
            "        for gradient, part in list(zip(group, parts, strict=True))[: max(1, len(group) - 1)]:",
        ),
        kills="replicas",
        phase="grad_sync|backward",
        region="*",
        cause="not_summed",
    ),
    Mutant(
        name="gradients-summed-after-every-micro-batch",
        stands_for="no_sync forgotten: an accumulated gradient is summed over data ranks again and again",
        modes=everywhere("dp>1", TENSOR),
        changes=_one(
            "training.step",
            "summed.backward()",
            "summed.backward()\n        if micro < case.micro - 1:\n"
            '            sync.sum_gradients(rank.gradients().values(), rank.mesh.axis("dp"))',
        ),
        kills="ledger|parameter_gradients",
        phase="backward|grad_sync|data",
        region="*",
        cause="extra_call|unequal_shares|summed_twice",
    ),
    Mutant(
        name="loss-of-own-data",
        stands_for="the reported loss is not summed over data ranks, its token count is",
        modes=everywhere(),
        condition="dp>1",
        changes=_one("communication.gradients", "return pair[0], pair[1]", "return loss.double(), pair[1]"),
        kills="replicas|forward",
        phase="loss|grad_sync",
        region="",
        cause="not_summed",
    ),
    Mutant(
        name="loss-of-the-last-micro-batch",
        stands_for="the last micro-batch's loss is reported for the step's",
        modes=everywhere(),
        changes=_one("training.step", "loss += summed.detach()", "loss = summed.detach().to(loss.dtype)"),
        kills="forward",
        phase="loss",
        region="",
        cause="micro_missing",
    ),
    Mutant(
        name="tokens-of-the-last-micro-batch",
        stands_for="Hugging Face #34191: the token count of one micro-batch normalises the whole step",
        modes=everywhere(),
        changes=_one("training.step", "tokens += weights.sum()", "tokens = weights.sum().to(tokens.dtype)"),
        kills="forward|parameter_gradients",
        phase="loss|grad_sync|backward",
        region="*",
        cause="local_count|constant_factor|micro_missing",
    ),
    Mutant(
        name="first-micro-batch-without-backward",
        stands_for="accumulation that begins with the second micro-batch (off by one in the boundary test)",
        modes=everywhere(),
        changes=_one("training.step", "summed.backward()", "summed.backward() if micro else None"),
        kills="parameter_gradients|ledger",
        phase="backward|grad_sync",
        region="*",
        cause="micro_missing|missing_call",
    ),
    Mutant(
        name="maximum-of-own-columns",
        stands_for="Megatron cross_entropy without its first step: the maximum is not reduced",
        modes=everywhere("head=parallel", TENSOR) | {"isp": "head=exchange"},
        changes=_one(
            "layers.loss", 'x -= all_reduce(x.amax(-1), axis, op="max")[..., None]', "x -= x.amax(-1)[..., None]"
        ),
        kills="ledger|forward|replicas",
        phase="loss|forward",
        region="|head",
        cause="missing_call|desynchronised",
    ),
    Mutant(
        name="norm-is-a-maximum",
        stands_for="the norm's squares reduced by MAX, which is right for the infinity norm only",
        modes=everywhere(),
        changes=_one(
            "communication.gradients",
            "total = all_reduce(total, axis)",
            'total = all_reduce(total, axis, op="max")',
        ),
        kills="ledger|gradient_norm",
        phase="grad_sync|step",
        region="",
        cause="wrong_op|norm_counts_few",
    ),
    Mutant(
        name="norm-before-the-mean",
        stands_for="the norm is taken of gradient sums, the step of their means",
        modes=everywhere(),
        changes=_one(
            "training.loop",
            "rank.step.norm(rank)",
            "rank.step.norm(rank) * tokens.to(wide(dtype_of(rank.case)))",
        ),
        kills="gradient_norm",
        phase="grad_sync|step",
        region="",
        cause="constant_factor",
    ),
    Mutant(
        name="copies-of-kv-heads-averaged",
        stands_for="gradients of replicated kv heads averaged instead of summed",
        modes={"isp": "tp>kv_heads"},
        changes=_one("layers.ulysses", "copies.sum(_KV_HEADS + 1)", "copies.mean(_KV_HEADS + 1)"),
        kills="parameter_gradients|activation_gradients",
        phase="backward",
        region="layers.*.attention*|layers.*",
        cause="averaged",
    ),
    Mutant(
        name="table-gradient-averaged",
        stands_for="InternEvo 76be8c2 for the embedding alone: AVG for SUM",
        modes={"isp": ""},
        changes=_one(
            "weights.tables",
            "return reduce_scatter(grad, ctx.axis, dim=ctx.dim), None, None",
            'return reduce_scatter(grad, ctx.axis, dim=ctx.dim, op="avg"), None, None',
        ),
        kills="ledger|parameter_gradients",
        phase="backward",
        region="embedding|embedding.*",
        cause="wrong_op|averaged",
    ),
)
"""Sums and factors."""
