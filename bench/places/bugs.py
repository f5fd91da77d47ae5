"""Bugs planted in subjects that declare no layout of activations, each with the module that is to be named.

The places were written down before any of them was searched for. `*` stands for any text, `|` separates places that are
equally right: where the truth is known by outputs alone (our decoder's), a fault in the code between two modules shows
first in the second of them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUGS", "CORE", "DENSE", "MEGATRON", "SP", "TP", "Bug", "by_dtensor", "by_hand", "ours"]

_SIZES = "layers=2 heads=4 kv_heads=4 hidden=16 ffn=24 seq=8 vocab=40 batch=2 micro=3 steps=1"
TP, SP = f"mode=tp tp=2 dp=2 {_SIZES}", f"mode=tp-sp tp=2 dp=2 {_SIZES}"
_OURS = "layers=2 heads=4 kv_heads=2 hidden=16 ffn=24 seq=8 vocab=264 steps=1"
HAND, DTENSOR, DENSE = "bench.places.by_hand", "bench.places.by_dtensor", "bench.places.dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """The one occurrence of `old` in `module` reads `new`; the first place to be named is `phase` of `place`."""

    subject: str
    case: str
    module: str
    old: str
    new: str
    phase: str
    place: str


def by_hand(case: str, old: str, new: str, phase: str, place: str) -> Bug:
    """A bug of the decoder split by hand."""
    return Bug(subject=f"{HAND}:subject", case=case, module=HAND, old=old, new=new, phase=phase, place=place)


def by_dtensor(module: str, old: str, new: str, phase: str, place: str) -> Bug:
    """A bug of the decoder split by DTensor, in its plans or in the dense modules."""
    return Bug(subject=f"{DTENSOR}:subject", case=TP, module=module, old=old, new=new, phase=phase, place=place)


def ours(mode: str, module: str, old: str, new: str, phase: str, place: str) -> Bug:
    """A bug of our own implementation of the decoder."""
    return Bug(
        subject="parallel.subject:subject",
        case=f"{mode} {_OURS}",
        module=f"parallel.{module}",
        old=old,
        new=new,
        phase=phase,
        place=place,
    )


CORE = "functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
_CORE_OF_OURS = "functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None)"
_SUM = "y = _apply(y, groups.sum, lambda g: g)"
_ENTER = "x = _apply(x, lambda t: t.clone(), groups.sum)"
_REDUCED = "grad_x = reduced.wait()"

BUGS: dict[str, Bug] = {
    # by hand
    "row linear without its all-reduce": by_hand(TP, _SUM, "pass", "forward", "layers.0.attention.o"),
    "row linear adds its bias on every rank": by_hand(
        TP,
        f"{_SUM}\n        return y + self.bias",
        f"{_SUM.replace('(y, ', '(y + self.bias, ', 1)}\n        return y",
        "forward",
        "layers.0.attention.o",
    ),
    "row linear averages": by_hand(
        TP, _SUM, _SUM.replace("groups.sum", "lambda t: groups.sum(t) / 2"), "forward", "layers.0.attention.o"
    ),
    "another rank's shard of one weight": by_hand(
        TP,
        'self.up = Column(groups, given["up.weight"],',
        'self.up = Column(groups, given["up.weight"].roll(12, 0),',
        "forward",
        "layers.0.mlp.up",
    ),
    "sequence parts of another rank": by_hand(
        SP,
        "tokens = self.groups.part(tokens, 1)",
        "tokens = self.groups.part(tokens.roll(4, 1), 1)",
        "forward",
        "embedding",
    ),
    "attention without its mask": by_hand(
        SP, CORE, CORE.replace("is_causal=True", "is_causal=False"), "forward", "layers.0.attention"
    ),
    "attention scaled by the head's width": by_hand(
        TP, CORE, CORE.replace("True)", "True, scale=1 / self.head)"), "forward", "layers.0.attention"
    ),
    "a larger epsilon in the norm": by_hand(TP, "+ 1e-6)", "+ 1e-2)", "forward", "layers.0.norm1"),
    "relu for gelu": by_hand(
        SP, "functional.gelu(self.up(x))", "functional.relu(self.up(x))", "forward", "layers.0.mlp"
    ),
    "reduce-scatter hands out other parts": by_hand(
        SP,
        "lambda t: groups.part(groups.sum(t), 1), lambda g: groups.gather(g, 1))",
        "lambda t: groups.part(groups.sum(t).roll(4, 1), 1), lambda g: groups.gather(g, 1))",
        "forward",
        "layers.0.attention.o",
    ),
    "no column linear sums its input's gradient": by_hand(
        TP, _ENTER, _ENTER.replace("groups.sum", "lambda g: g"), "backward", "head"
    ),
    "one column linear does not sum its input's gradient": by_hand(
        TP,
        _ENTER,
        _ENTER.replace("groups.sum", "lambda g: g if self.weight.shape[0] == 12 else groups.sum(g)"),
        "backward",
        "layers.1.mlp.up",
    ),
    "residual detached": by_hand(
        TP, "y: Tensor = x + self.mlp", "y: Tensor = x.detach() + self.mlp", "backward", "layers.1"
    ),
    "gradients of the norms not summed over tp": by_hand(
        SP, 'return "norm" in name or', "return", "grad_sync|backward", "final_norm"
    ),
    # DTensor
    "row-wise plan that sums nothing": by_dtensor(
        DTENSOR,
        "DOWN = RowwiseParallel\n",
        "class DOWN(RowwiseParallel):\n"
        "    @staticmethod\n"
        "    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):\n"
        "        return outputs.to_local()\n",
        "forward",
        "layers.0.mlp.down",
    ),
    "one rank's shards swapped": by_dtensor(
        DENSE,
        'found[name] = 1 + 0.3 * value if "norm" in name else 0.4 * value',
        'found[name] = 1 + 0.3 * value if "norm" in name else 0.4 * value\n'
        '        if name == "layers.1.mlp.up.weight":\n'
        "            found[name] = found[name].roll(12, 0)",
        "forward",
        "layers.1.mlp.up",
    ),
    "DTensor: a larger epsilon in the norm": by_dtensor(DENSE, "+ 1e-6)", "+ 1e-2)", "forward", "layers.0.norm1"),
    "DTensor: attention without its mask": by_dtensor(
        DENSE, CORE, CORE.replace("is_causal=True", "is_causal=False"), "forward", "layers.0.attention"
    ),
    "DTensor: the residual of the MLP is its normed input": by_dtensor(
        DENSE,
        "y: Tensor = x + self.mlp(self.norm2(x))",
        "y: Tensor = self.norm2(x) + self.mlp(self.norm2(x))",
        "forward",
        "layers.0",
    ),
    "DTensor: local weights without the sum of the input's gradient": by_dtensor(
        DENSE,
        "self.down(functional.gelu(self.up(x)))",
        "self.down(functional.gelu(functional.linear(x, self.up.weight.to_local(), self.up.bias.to_local())))",
        "backward",
        "layers.1.mlp",
    ),
    # our decoder, its truth known by outputs alone
    "ours: rows of another layout": ours(
        "mode=fsp family=internlm2 tp=2",
        "layers.linear",
        "pairs.reduce_scatter_to_sequence(y, self.axis",
        "pairs.reduce_scatter_to_sequence(y.transpose(0, 1).reshape(y.shape), self.axis",
        "forward",
        "layers.0.attention.wo",
    ),
    "ours: input gradient of one linear halved": ours(
        "mode=tp tp=2",
        "layers.linear",
        _REDUCED,
        f"{_REDUCED} / (1 + (weight.shape[0] == 12))",
        "backward",
        "layers.1.mlp.w1",
    ),
    "ours: residual detached": ours(
        "mode=tp tp=2",
        "model.transformer",
        "y: Tensor = x + self._dropped",
        "y: Tensor = x.detach() + self._dropped",
        "backward",
        "layers.1",
    ),
    "ours: every data rank reads the first one's data": ours(
        "mode=tp tp=2 dp=3",
        "communication.batch",
        'batch = micro_batch(case, step, micro, mesh.axis("dp").rank) if reads else None',
        "batch = micro_batch(case, step, micro, 0) if reads else None",
        "forward",
        "embedding",
    ),
    "ours: attention scaled by the head's width": ours(
        "mode=tp-sp tp=2 dp=2",
        "layers.attention",
        _CORE_OF_OURS,
        _CORE_OF_OURS[:-1] + ", scale=1 / q.shape[-1])",
        "forward",
        "layers.0.attention|layers.0.attention.wo",
    ),
    "ours: another base of the rotary table": ours(
        "mode=tp-sp tp=2 positions=rope",
        "layers.attention",
        "_ROTARY_BASE = 10000.0",
        "_ROTARY_BASE = 500000.0",
        "forward",
        "layers.0.attention|layers.0.attention.wo",
    ),
    "ours: row linear without its all-reduce": ours(
        "mode=tp tp=2",
        "layers.linear",
        "return pairs.reduce_from(y, self.axis)",
        "return y",
        "forward",
        "embedding|layers.0.attention.wo",
    ),
    "ours: gelu without its approximation": ours(
        "mode=tp tp=2",
        "layers.mlp",
        'functional.gelu(first, approximate="tanh")',
        "functional.gelu(first)",
        "forward",
        "layers.0.mlp|layers.0.mlp.w2",
    ),
}
"""Name -> bug."""

MEGATRON: dict[str, tuple[str, str]] = {
    "no sum leaves a tensor-parallel region": ("forward", "embedding.word_embeddings"),
    "row linear halves its output": ("forward", "decoder.layers.0.self_attention.linear_proj"),
    "attention scaled by the head's width": ("forward", "decoder.layers.0.self_attention.core_attention"),
    "attention without its mask": (
        "forward",
        "decoder.layers.0.self_attention.core_attention|decoder.layers.0.self_attention.core_attention.scale_mask_softmax",
    ),
    "no column linear sums its input's gradient": ("backward", "output_layer"),
    "a larger epsilon in the norm": ("forward", "decoder.layers.0.input_layernorm"),
    "relu for gelu": ("forward", "decoder.layers.0.mlp"),
    "a vocabulary that begins one row too late": ("forward", "embedding.word_embeddings"),
}
"""Patch of `bench.places.megatron` -> phase and place."""
