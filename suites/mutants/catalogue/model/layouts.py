"""Layouts: fused weights cut wrongly, axes named before and after a transposition, flat memory (bugs.md 6e, first)."""

from __future__ import annotations

from suites.mutants.mutant import TENSOR, Change, Mutant, everywhere

__all__ = ["LAYOUTS"]

_GROUPED = (
    "grouped = self.wqkv(x).unflatten(-1, (-1, group + 2, dim))\n"
    "        return grouped[..., :group, :].flatten(2, 3), grouped[..., group, :], grouped[..., group + 1, :]"
)
_JOIN = "return torch.cat(parts.chunk(axis.size), dim)"
_SPLIT = "return parts.flatten(0, 1).contiguous()"
_OWN_TOKENS = "(own_slice(x, sequence, dim=_SEQUENCE) for x in (batch.tokens, batch.positions))"
_RECEIVED = "q_own, (k_own, v_own) = q_pending.wait(), kv_pending.wait().unbind(2)"
_SUMMED = "summed.split([gradient.numel() for gradient in group])"
_PARTS = "parts = own.split("
_ATTENTION = "layers.0.attention*"
_SEVERAL_ROWS = "batch>1 packed=false"
_EMBEDDED = {"mtp": "embedding=hidden", "tp": "head=gather", "tp-sp": "head=gather"}


def _collectives(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.communication.collectives", old=old, new=new),)


LAYOUTS = (
    Mutant(
        name="fused-qkv-cut-as-three-blocks",
        stands_for="B-52: Megatron 000d291092, all q, all k, all v, where every group has its own",
        modes=everywhere("kv_heads>tp", TENSOR) | {"isp": "kv_heads>1"},
        condition="fuse_qkv=true",
        changes=(
            Change(
                module="parallel.layers.attention",
                old=_GROUPED,
                new="heads = self.wqkv(x).unflatten(-1, (-1, dim))\n"
                "        groups = heads.shape[-2] // (group + 2)\n"
                "        q, k, v = heads.split([group * groups, groups, groups], -2)\n"
                "        return q, k, v",
            ),
        ),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="fused_cut",
    ),
    Mutant(
        name="keys-and-values-exchanged",
        stands_for="B-53: gpt-neox #1315, a reshape that mixes q, k and v",
        modes=everywhere(),
        condition="fuse_qkv=true",
        changes=(
            Change(
                module="parallel.layers.attention",
                old="grouped[..., group, :], grouped[..., group + 1, :]",
                new="grouped[..., group + 1, :], grouped[..., group, :]",
            ),
        ),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="kv_exchanged",
    ),
    Mutant(
        name="fused-gate-and-up-cut-as-one",
        stands_for="B-54: Megatron PR #520, a fused gate and up projection is sharded as one block",
        modes=everywhere("", TENSOR),
        condition="fuse_mlp=true",
        changes=(
            Change(
                module="parallel.schemes.tensor",
                old='return (case.ffn, case.ffn) if module.endswith(".w13") else ()',
                new="return ()",
            ),
        ),
        kills="activations",
        phase="forward",
        region="layers.0.mlp*",
        cause="fused_cut",
    ),
    Mutant(
        name="gate-and-up-exchanged",
        stands_for="B-54: the interleave of gate and up is lost",
        modes=everywhere(),
        condition="fuse_mlp=true",
        changes=(
            Change(
                module="parallel.layers.mlp",
                old="first, up = self.w13(x).chunk(2, -1)",
                new="up, first = self.w13(x).chunk(2, -1)",
            ),
        ),
        kills="activations",
        phase="forward",
        region="layers.0.mlp*",
        cause="gate_exchanged",
    ),
    Mutant(
        name="all-to-all-without-its-permutation",
        stands_for="B-55: DeepSpeed #5664, the transposition around an all-to-all was missing",
        modes={"isp": ""},
        changes=_collectives(
            "_join(received, axis, gather_dim)", "received.reshape(_join(received, axis, gather_dim).shape)"
        ),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="flat_dim",
    ),
    Mutant(
        name="rows-and-sequence-mixed",
        stands_for="B-56: DeepSpeed #5823, Ulysses is wrong for more than one row",
        modes={"isp": _SEVERAL_ROWS},
        changes=(
            Change(
                module="parallel.layers.ulysses",
                old=_RECEIVED,
                new=f"{_RECEIVED}\n        q_own = q_own.transpose(0, 1).reshape(q_own.shape)",
            ),
        ),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="transposed",
    ),
    Mutant(
        name="gathered-on-flat-memory",
        stands_for="B-58, B-59: gpt-neox 9d883dea, torchtitan #3206, tensors joined along dim 0 for another dim (B1)",
        modes={"isp": "", "msp": _SEVERAL_ROWS, "fsp": _SEVERAL_ROWS, **_EMBEDDED},
        changes=_collectives(_JOIN, "return parts.reshape(torch.cat(parts.chunk(axis.size), dim).shape)"),
        kills="activations",
        phase="forward",
        region=f"embedding|head|{_ATTENTION}",
        cause="flat_dim",
    ),
    Mutant(
        name="scattered-on-flat-memory",
        stands_for="B-58: the same for what is scattered; InternEvo's embedding gradient (decision E1)",
        modes={"isp": "", "msp": _SEVERAL_ROWS, "fsp": _SEVERAL_ROWS},
        changes=_collectives(_SPLIT, "return x.contiguous().reshape(parts.flatten(0, 1).shape)"),
        kills="activations",
        phase="forward",
        region=f"embedding|{_ATTENTION}",
        cause="flat_dim",
    ),
    Mutant(
        name="token-index-without-its-row",
        stands_for="B-60: torchtitan #3604, local index + n * rank, right for one row only",
        modes={"isp": _SEVERAL_ROWS},
        changes=(
            Change(
                module="parallel.schemes.weight_parallel",
                old=_OWN_TOKENS,
                new="(own_slice(x.flatten(), sequence, dim=0).view(len(x), -1) "
                "for x in (batch.tokens, batch.positions))",
            ),
        ),
        kills="activations",
        phase="forward",
        region="embedding",
        cause="rows_permuted|other_shard|flat_dim",
    ),
    Mutant(
        name="kv-heads-repeated-in-another-order",
        stands_for="B-63: BigScience #244, what belongs to a head is taken from the first heads on every rank",
        modes={"isp": "kv_heads<tp kv_heads>1"},
        changes=(
            Change(
                module="parallel.layers.ulysses",
                old="torch.stack((k, v), 2).repeat_interleave(ctx.copies, _KV_HEADS)",
                new="torch.stack((k, v), 2).repeat(1, 1, 1, ctx.copies, 1)",
            ),
        ),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="kv_order",
    ),
    Mutant(
        name="flat-buffer-walked-with-another-stride",
        stands_for="B-67: DeepSpeed #8158, sized aligned and walked unaligned",
        modes=everywhere("dp>1", TENSOR) | {"isp": "wdp>1"},
        changes=(
            Change(
                module="parallel.communication.gradients", old=_SUMMED, new=_SUMMED.replace("summed", "summed.roll(1)")
            ),
        ),
        kills="parameter_gradients|replicas",
        phase="backward|grad_sync",
        region="head|final_norm|embedding.*|layers.*",
        cause="flat_offset",
    ),
    Mutant(
        name="fused-gradients-walked-with-another-stride",
        stands_for="B-67, B-82: the same in the flat buffer of a block's weights",
        modes={"isp": "fuse_weights=true"},
        changes=(Change(module="parallel.weights.flat", old=_PARTS, new=_PARTS.replace("own", "own.roll(1)")),),
        kills="parameter_gradients",
        phase="backward",
        region="layers.*",
        cause="flat_offset",
    ),
    Mutant(
        name="head-made-dense-again",
        stands_for="B-73: picotron #23, the head is made anew as a dense layer after it was split",
        modes=everywhere("", TENSOR),
        condition="tied=false head=parallel",
        changes=(
            Change(
                module="parallel.schemes.tensor",
                old='    if module in ("embedding.tokens", "head"):',
                new='    if module == "embedding.tokens":',
            ),
        ),
        kills="replicas|merge|run",
        phase="forward|backward|grad_sync|loss",
        region="head|",
        cause="other_shard",
    ),
)
