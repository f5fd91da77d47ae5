"""Held back: the right numbers in the wrong place, or of the wrong tokens, weights or ranks."""

from __future__ import annotations

from suites.mutants.mutant import SPLIT, TENSOR, Change, Mutant, everywhere

__all__ = ["MUTANTS"]

_MIXED = "other_shard|shifted_shard|rows_permuted"


def _one(module: str, old: str, new: str) -> tuple[Change, ...]:
    return (Change(module=f"parallel.{module}", old=old, new=new),)


MUTANTS = (
    Mutant(
        name="slices-counted-from-the-end",
        stands_for="a rank takes the slice of its mirror image (reversed rank order of a device mesh)",
        modes=everywhere("", ("isp",)) | everywhere("positions=learned", SPLIT),
        changes=_one(
            "communication.collectives",
            "return x.narrow(dim, axis.rank * width, width).contiguous()",
            "return x.narrow(dim, (axis.size - 1 - axis.rank) * width, width).contiguous()",
        ),
        kills="activations|forward|ledger",
        phase="forward",
        region="embedding*|",
        cause=_MIXED,
    ),
    Mutant(
        name="received-parts-in-reverse-order",
        stands_for="parts concatenated in the order of arrival and not of ranks",
        modes=everywhere("embedding=hidden", ("mtp", "msp", "fsp")) | {"isp": ""},
        changes=_one(
            "communication.collectives",
            "return torch.cat(parts.chunk(axis.size), dim)",
            "return torch.cat(parts.chunk(axis.size)[::-1], dim)",
        ),
        kills="activations|forward",
        phase="forward",
        region="embedding|layers.0.attention*",
        cause=_MIXED,
    ),
    Mutant(
        name="data-ranks-read-in-reverse",
        stands_for="a sampler that counts data ranks from the end, or of another group order",
        modes=everywhere(),
        condition="dp>1",
        changes=_one(
            "communication.batch",
            'batch = micro_batch(case, step, micro, mesh.axis("dp").rank) if reads else None',
            'batch = micro_batch(case, step, micro, case.dp - 1 - mesh.axis("dp").rank) if reads else None',
        ),
        kills="forward|activations",
        phase="forward|data",
        region="embedding*|",
        cause=_MIXED,
    ),
    Mutant(
        name="micro-batches-read-in-reverse",
        stands_for="an iterator that hands out micro-batches last first (interleaved pipelines)",
        modes=everywhere(),
        changes=_one(
            "communication.batch",
            'batch = micro_batch(case, step, micro, mesh.axis("dp").rank) if reads else None',
            'batch = micro_batch(case, step, case.micro - 1 - micro, mesh.axis("dp").rank) if reads else None',
        ),
        kills="forward|activations",
        phase="forward|data",
        region="embedding*|",
        cause=_MIXED,
    ),
    Mutant(
        name="data-of-the-next-step",
        stands_for="a loader that is one batch ahead after its warm-up",
        modes=everywhere(),
        changes=_one(
            "communication.batch",
            'batch = micro_batch(case, step, micro, mesh.axis("dp").rank) if reads else None',
            'batch = micro_batch(case, step + 1, micro, mesh.axis("dp").rank) if reads else None',
        ),
        kills="forward|activations",
        phase="forward|data",
        region="embedding*|",
    ),
    Mutant(
        name="batch-of-the-last-rank",
        stands_for="broadcast from the last rank of the group, which has read nothing",
        modes=everywhere("delivery=tensors", ("tp", "tp-sp")),
        changes=_one(
            "communication.collectives",
            "dist.broadcast(buffer, axis.ranks[0], axis.group)",
            "dist.broadcast(buffer, axis.ranks[-1], axis.group)",
        ),
        kills="forward|activations",
        phase="forward|data",
        region="embedding*|",
    ),
    Mutant(
        name="first-token-in-the-sentence-before",
        stands_for="off by one in cu_seqlens: the first token of a sentence belongs to the one before",
        modes=everywhere(),
        condition="packed=true",
        changes=_one(
            "communication.batch",
            "sentence = torch.bucketize(index, cu_seqlens.to(device), right=True)",
            "sentence = torch.bucketize(index, cu_seqlens.to(device), right=False)",
        ),
        kills="activations|forward",
        phase="forward",
        region="layers.0.attention|layers.0.attention.*",
    ),
    Mutant(
        name="biases-of-the-first-rank",
        stands_for="BigScience 40e8b2a0: a vector that belongs to heads is not cut by rank",
        modes=everywhere("bias=true", TENSOR),
        changes=_one(
            "training.loop",
            "parameter.copy_(initial(case, name, places[name], mesh.coordinates, streams))",
            "at = {a: (i if parameter.dim() > 1 else 0, n) for a, (i, n) in mesh.coordinates.items()}\n"
            "            parameter.copy_(initial(case, name, places[name], at, streams))",
        ),
        kills="activations|forward",
        phase="forward",
        region="layers.0.attention.*",
        cause="other_shard|shifted_shard|one_shard",
    ),
    Mutant(
        name="layers-begin-alike",
        stands_for="layer index lost in the names: every layer is loaded from the first one's weights",
        modes=everywhere(),
        condition="layers>1",
        changes=_one(
            "training.loop",
            "parameter.copy_(initial(case, name, places[name], mesh.coordinates, streams))",
            'first = name.replace("layers.1.", "layers.0.")\n'
            "            parameter.copy_(initial(case, first, places[name], mesh.coordinates, streams))",
        ),
        kills="activations|forward",
        phase="forward",
        region="layers.1.attention_norm",
    ),
    Mutant(
        name="first-row-of-a-table-not-learned",
        stands_for="padding_idx=0 in a sharded embedding: the first row of every shard gets no gradient",
        modes=everywhere("embedding=vocab", TENSOR),
        changes=_one(
            "layers.embedding",
            "functional.embedding(local.masked_fill(outside, 0), weight)",
            "functional.embedding(local.masked_fill(outside, 0), weight, padding_idx=0)",
        ),
        kills="parameter_gradients",
        phase="backward|grad_sync",
        region="embedding|embedding.tokens",
    ),
    Mutant(
        name="value-heads-repeated-in-another-order",
        stands_for="repeat for repeat_interleave, in the values alone (grouped queries)",
        modes=everywhere(),
        condition="heads!=kv_heads",
        changes=_one(
            "layers.attention",
            "k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)",
            "k, v = k.repeat_interleave(group, 1), v.repeat(1, group, 1, 1)",
        ),
        kills="activations|forward",
        phase="forward",
        region="layers.0.attention|layers.0.attention.*",
        cause="kv_order|other_shard|rows_permuted",
    ),
    Mutant(
        name="gradients-of-keys-and-values-exchanged",
        stands_for="DeepSpeed #5664: keys and values change places on the way back only",
        modes={"isp": ""},
        changes=_one(
            "layers.ulysses",
            "k_all, v_all = copies.sum(_KV_HEADS + 1).unbind(2)",
            "v_all, k_all = copies.sum(_KV_HEADS + 1).unbind(2)",
        ),
        kills="parameter_gradients|activation_gradients",
        phase="backward",
        region="layers.*.attention*|layers.*",
        cause="kv_exchanged",
    ),
    Mutant(
        name="gathered-input-is-the-own-slice",
        stands_for="a cache that keeps the slice where the gathered input is expected",
        modes={"msp": ""},
        changes=_one(
            "layers.linear",
            "ctx.save_for_backward(total if region.keep else x, weight)",
            "ctx.save_for_backward(x, weight)",
        ),
        kills="run",
        cause="raised",
    ),
)
"""Layouts, ranks, data."""
