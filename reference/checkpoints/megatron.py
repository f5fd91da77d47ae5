"""Checkpoints of Megatron-Core (`dist_checkpointing`, backend torch_dist) in the names of the dense model.

    tensors of torch's format    parameters; layers in one tensor along a first dim, or under their number
    bytes of torch's format      `<module>._extra_state/shard_<layer>_<layers>`: what a module keeps beside them
    metadata.json, common.pt     the format; what is the same on all ranks

The vocabulary is padded. As in the dense model with fuse_qkv=true and fuse_mlp=true, qkv is fused by kv groups, gate
and up one behind the other. Parameters alone are read. Source: Megatron-Core 0.16.1 `GPTModel.sharded_state_dict`,
`TransformerBlock.sharded_state_dict`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from shardproof.reference.checkpoints.fused import Unfit
from shardproof.reference.checkpoints.whole import tensors

_NAMES = {
    "embedding.word_embeddings": "embedding.tokens",
    "embedding.position_embeddings": "embedding.positions",
    "output_layer": "head",
    "decoder.final_layernorm": "final_norm",
    "decoder.layers.input_layernorm": "layers.#.attention_norm",
    "decoder.layers.self_attention.linear_qkv": "layers.#.attention.wqkv",
    "decoder.layers.self_attention.linear_proj": "layers.#.attention.wo",
    "decoder.layers.self_attention.q_layernorm": "layers.#.attention.q_norm",
    "decoder.layers.self_attention.k_layernorm": "layers.#.attention.k_norm",
    "decoder.layers.pre_mlp_layernorm": "layers.#.mlp_norm",
    "decoder.layers.mlp.linear_fc1": "layers.#.mlp.w1",
    "decoder.layers.mlp.linear_fc2": "layers.#.mlp.w2",
}
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_OTHERS = ("optimizer.", "rng_state")


def is_megatron(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of dist_checkpointing."""
    marked = folder / "metadata.json"
    return marked.is_file() and b'"sharded_backend"' in marked.read_bytes()


def read(folder: Path, *, vocab: int) -> dict[str, Tensor]:
    """Its parameters in full by their names in the dense model, the vocabulary cut to these rows (0: with its padding).

    Raises Unfit for a tensor that the dense model does not have, or that is not whole; CaseError for files that torch
    cannot read.
    """
    stored = {key: tensor for key, tensor in tensors(str(folder)).items() if not key.startswith(_OTHERS)}
    gated, found = _is_gated(stored), dict[str, Tensor]()
    for key, tensor in stored.items():
        if not tensor.dim() or not tensor.is_floating_point() or tensor.isnan().any():
            rule = f"holds {key}, of which elements are missing or are no numbers"
            raise Unfit(rule, "a number for every element")
        ours, number = _named(key, gated=gated)
        layers = enumerate(tensor) if "#" in ours and not number else [(number, tensor)]
        found |= {ours.replace("#", str(layer)): part for layer, part in layers}
        if key in _VOCABULARY:
            found[ours] = tensor[: vocab or len(tensor)]
    return found


def _named(key: str, *, gated: bool) -> tuple[str, str]:
    """(the name in the dense model, its layer as "#"; the number of the layer, "" where the tensor holds all of them).

    Raises Unfit for a tensor that the dense model does not have.
    """
    number = re.search(r"\.layers\.(\d+)\.", key)
    plain = key.replace(f".{number[1]}.", ".", 1) if number else key
    plain = re.sub(r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm.", plain)
    plain = re.sub(r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm.", plain)
    module, _, leaf = plain.rpartition(".")
    ours = _NAMES.get(module)
    if ours is None:
        raise Unfit(f"holds {key}, which the dense model does not have", "a GPTModel's")
    fused = "3" if gated and ours.endswith(".w1") else ""
    return f"{ours}{fused}.{leaf}", number[1] if number else ""


def _is_gated(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the first linear of the MLP holds a gate too: it is twice as wide as the second one then."""
    widths = {re.sub(r"\.\d+", "", key): [*tensor.shape] for key, tensor in tensors.items()}
    first, second = (widths.get(f"decoder.layers.mlp.{name}.weight", [0]) for name in ("linear_fc1", "linear_fc2"))
    return len(first) > 1 and first[-2] == 2 * second[-1] > 0
