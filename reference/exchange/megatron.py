"""Checkpoints of Megatron-Core (`dist_checkpointing`, backend torch_dist) in the names of the dense model.

Layers lie in one tensor along a first dim (or under their number); the vocabulary is padded; qkv is fused by kv groups,
gate and up one behind the other, as in the dense model with fuse_qkv=true and fuse_mlp=true. Parameters alone are read.
Source: Megatron-Core 0.16.1 `GPTModel.sharded_state_dict`, `TransformerBlock.sharded_state_dict`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from reference.errors import CaseError

__all__ = ["is_megatron", "named"]

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


def is_megatron(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of dist_checkpointing."""
    marked = folder / "metadata.json"
    return marked.is_file() and b'"sharded_backend"' in marked.read_bytes()


def named(folder: Path, tensors: Mapping[str, Tensor], *, vocab: int) -> dict[str, Tensor]:
    """Its parameters by their names in the dense model, the vocabulary without its padding.

    Raises CaseError for a tensor that the dense model does not have.
    """
    found: dict[str, Tensor] = {}
    gated = _gated(tensors)
    for key, tensor in tensors.items():
        if key.startswith(("optimizer.", "rng_state")):
            continue
        number = re.search(r"\.layers\.(\d+)\.", key)
        plain = key.replace(f".{number[1]}.", ".", 1) if number else key
        plain = re.sub(r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm.", plain)
        plain = re.sub(r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm.", plain)
        module, _, leaf = plain.rpartition(".")
        ours = _NAMES.get(module)
        if ours is None:
            raise CaseError("load", str(folder), f"holds {key}, which the dense model does not have", "a GPTModel's")
        ours = f"{ours}3.{leaf}" if gated and ours.endswith(".w1") else f"{ours}.{leaf}"
        layers = enumerate(tensor) if "#" in ours and number is None else [(number[1] if number else "", tensor)]
        found |= {ours.replace("#", str(layer)): part for layer, part in layers}
        if key in _VOCABULARY:
            found[ours] = tensor[: vocab or len(tensor)]
    return found


def _gated(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the first linear of the MLP holds a gate too: it is twice as wide as the second one then."""
    widths = [
        next((x.shape for key, x in tensors.items() if re.fullmatch(fits, key)), None)
        for fits in (
            r"decoder\.layers(\.\d+)?\.mlp\.linear_fc1\.weight",
            r"decoder\.layers(\.\d+)?\.mlp\.linear_fc2\.weight",
        )
    ]
    return widths[0] is not None and widths[1] is not None and widths[0][-2] == 2 * widths[1][-1]
