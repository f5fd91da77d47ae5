"""Bugs like those of `bench.places.bugs` that nobody had looked at when the search was written."""

from __future__ import annotations

from bench.places.bugs import CORE, DENSE, SP, TP, Bug, by_dtensor, by_hand, ours

__all__ = ["HELD_BACK", "MEGATRON_HELD_BACK", "TUTORIALS"]


def _tutorial(name: str, old: str, new: str, place: str) -> Bug:
    """A bug of a subject under suites/subjects, whose truth is the one beside the right subject."""
    module, case = f"suites.subjects.{name}", "dp=3" if name == "fsdp2" else "tp=2 dp=3"
    return Bug(subject=f"{module}:subject", case=case, module=module, old=old, new=new, phase="forward", place=place)


_GATHER = "return torch.cat(parts, dim)"
_RESIDUAL = "x = x + self.attention(self.norm1(x))"
_DRAWN = 'found[name] = 1 + 0.3 * value if "norm" in name else 0.4 * value\n'

HELD_BACK: dict[str, Bug] = {
    # by hand
    "parts gathered in reverse": by_hand(
        SP, _GATHER, "return torch.cat(parts[::-1], dim)", "forward", "layers.0.attention.q"
    ),
    "values with the keys' weight": by_hand(
        TP, 'given["v.weight"]', 'given["k.weight"]', "forward", "layers.0.attention.v"
    ),
    "half of a row linear's bias": by_hand(
        TP, "return y + self.bias", "return y + self.bias / 2", "forward", "layers.0.attention.o"
    ),
    "the residual is the normed input": by_hand(
        SP, _RESIDUAL, _RESIDUAL.replace("x + ", "self.norm1(x) + "), "forward", "layers.0"
    ),
    "every data rank reads the first one's rows": by_hand(
        TP, "tokens = rows(case, groups.data_rank, micro)", "tokens = rows(case, 0, micro)", "forward", "embedding"
    ),
    "micro-batches in another order": by_hand(
        TP,
        "tokens = rows(case, groups.data_rank, micro)",
        "tokens = rows(case, groups.data_rank, (micro + 1) % case.micro)",
        "forward",
        "embedding",
    ),
    "row linear halves its gradient": by_hand(
        SP,
        "lambda t: groups.part(groups.sum(t), 1), lambda g: groups.gather(g, 1))",
        "lambda t: groups.part(groups.sum(t), 1), lambda g: groups.gather(g, 1) / 2)",
        "backward",
        "layers.1.mlp.down",
    ),
    "half of the queries detached": by_hand(
        TP,
        "(self.q(x), self.k(x)",
        "((self.q(x) + self.q(x).detach()) / 2, self.k(x)",
        "backward",
        "layers.1.attention",
    ),
    "the last norm left out": by_hand(
        TP,
        "y: Tensor = self.head(self.final_norm(x))",
        "y: Tensor = self.head(x + 0 * self.final_norm(x))",
        "forward",
        "",
    ),
    "no mask on one data rank": by_hand(
        TP, CORE, CORE.replace("True)", "self.q.groups.data_rank == 0)"), "forward", "layers.0.attention"
    ),
    # DTensor
    "DTensor: queries and keys swapped": by_dtensor(
        DENSE, "(self.q(x), self.k(x)", "(self.k(x), self.q(x)", "forward", "layers.0.attention"
    ),
    "DTensor: one bias doubled": by_dtensor(
        DENSE,
        _DRAWN,
        f'{_DRAWN}        found[name] *= 1 + (name == "layers.0.mlp.down.bias")\n',
        "forward",
        "layers.0.mlp.down",
    ),
    "DTensor: silu for gelu": by_dtensor(DENSE, "functional.gelu(", "functional.silu(", "forward", "layers.0.mlp"),
    "DTensor: embeddings scaled": by_dtensor(
        DENSE, "x = self.embedding(tokens)\n", "x = self.embedding(tokens) * 4.0\n", "forward", ""
    ),
    "DTensor: the head has the embedding's weight": by_dtensor(
        DENSE,
        "    return found\n",
        '    return {**found, "head.weight": found["embedding.weight"]}\n',
        "forward",
        "head",
    ),
    # our decoder, its truth known by outputs alone
    "ours: attention without its residual": ours(
        "mode=tp-sp tp=2 dp=2",
        "transformer",
        "x = x + self.attention(",
        "x = self.attention(",
        "forward",
        "layers.0|layers.0.mlp_norm",
    ),
    "ours: another epsilon": ours(
        "mode=msp family=internlm2 tp=2 dp=2",
        "layers.norm",
        "width, weight, EPSILON",
        "width, weight, 1e-2",
        "forward",
        "layers.0.attention_norm",
    ),
    "ours: embeddings without their sum": ours(
        "mode=tp tp=2",
        "layers.embedding",
        "x_BSD = pairs.reduce_from(x_BSD, region.axis)\n",
        "pass\n",
        "forward",
        "embedding",
    ),
}
"""Name -> bug."""

MEGATRON_HELD_BACK: dict[str, tuple[str, str]] = {
    "queries doubled": ("forward", "decoder.layers.0.self_attention"),
    "attention without its residual": ("forward", "decoder.layers.0"),
    "the MLP's output grows by half": ("forward", "decoder.layers.0.mlp"),
    "another epsilon in the last norm": ("forward", "decoder.final_layernorm"),
}
"""Patch of `bench.places.megatron` -> phase and place."""

_ALL_REDUCE = 'dist.all_reduce(y.detach(), group=mesh.get_group("tp"))'
_PART = "model[0].weight.data[first : first + rows].clone()"
_SAMPLES = "case.samples(step, micro, dp_rank, 5)"

TUTORIALS: dict[str, Bug] = {
    "mlp: the last sum left out": _tutorial("mlp", _ALL_REDUCE, "None", "2"),
    "mlp: another rank's rows": _tutorial("mlp", _PART, _PART.replace("data[", "data.roll(rows, 0)["), "0"),
    "mlp: relu for gelu": _tutorial("mlp", "torch.nn.GELU()", "torch.nn.ReLU()", "1"),
    "mlp: averaged": _tutorial("mlp", _ALL_REDUCE, f"({_ALL_REDUCE}, y.detach().div_(2), None)[2]", "2"),
    "mlp: the first data rank's samples": _tutorial("mlp", _SAMPLES, _SAMPLES.replace("dp_rank", "0"), "0"),
    "dtensor: another epsilon": _tutorial("dtensor", "LayerNorm(case.width)", "LayerNorm(case.width, eps=0.1)", "1"),
    "dtensor: approximate gelu": _tutorial("dtensor", "nn.GELU()", 'nn.GELU("tanh")', "3"),
    "dtensor: other weights": _tutorial("dtensor", "100 * case.seed)", "100 * case.seed + 1)", "0"),
    "fsdp2: another epsilon": _tutorial("fsdp2", "nn.LayerNorm(size)", "nn.LayerNorm(size, eps=0.1)", "0.0"),
    "fsdp2: silu for gelu": _tutorial("fsdp2", "nn.GELU()", "nn.SiLU()", "0.2"),
    "fsdp2: the first micro-batch's samples": _tutorial("fsdp2", _SAMPLES, _SAMPLES.replace("micro", "0"), "0.0"),
}
"""Name -> bug of a subject with a truth and words of its own."""
