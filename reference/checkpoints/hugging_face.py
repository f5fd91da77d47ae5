"""Folders of Hugging Face (`save_pretrained`: config.json and files of safetensors) in the names of the dense model.

    llama, qwen3     q_proj, k_proj, v_proj, o_proj: wq, wk, wv, wo; gate_proj, up_proj, down_proj: w1, w3, w2;
                     rotary pairs are (i, i + D/2), as here
    gpt2             c_attn [in, q | k | v]: transposed, thirds; c_proj, c_fc transposed

Parameters alone are read: the base of the rotation and the epsilon of the norms are those of the dense model. Sources:
transformers 5.23 `modeling_llama.py`, `modeling_qwen3.py`, `modeling_gpt2.py` (Conv1D holds [in, out]).
"""

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shardproof.reference.checkpoints.fused import Unfit

_LLAMA = {
    "model.embed_tokens": "embedding.tokens",
    "model.norm": "final_norm",
    "lm_head": "head",
    "model.layers.#.input_layernorm": "layers.#.attention_norm",
    "model.layers.#.self_attn.q_proj": "layers.#.attention.wq",
    "model.layers.#.self_attn.k_proj": "layers.#.attention.wk",
    "model.layers.#.self_attn.v_proj": "layers.#.attention.wv",
    "model.layers.#.self_attn.o_proj": "layers.#.attention.wo",
    "model.layers.#.self_attn.q_norm": "layers.#.attention.q_norm",
    "model.layers.#.self_attn.k_norm": "layers.#.attention.k_norm",
    "model.layers.#.post_attention_layernorm": "layers.#.mlp_norm",
    "model.layers.#.mlp.gate_proj": "layers.#.mlp.w1",
    "model.layers.#.mlp.up_proj": "layers.#.mlp.w3",
    "model.layers.#.mlp.down_proj": "layers.#.mlp.w2",
}
_GPT2 = {
    "transformer.wte": "embedding.tokens",
    "transformer.wpe": "embedding.positions",
    "transformer.ln_f": "final_norm",
    "lm_head": "head",
    "transformer.h.#.ln_1": "layers.#.attention_norm",
    "transformer.h.#.attn.c_attn": "layers.#.attention.thirds",
    "transformer.h.#.attn.c_proj": "layers.#.attention.wo",
    "transformer.h.#.ln_2": "layers.#.mlp_norm",
    "transformer.h.#.mlp.c_fc": "layers.#.mlp.w1",
    "transformer.h.#.mlp.c_proj": "layers.#.mlp.w2",
}
_NAMES = {"llama": _LLAMA, "qwen3": _LLAMA, "gpt2": _GPT2}
_BUFFERS = re.compile(r"\.rotary_emb\.|\.attn\.(masked_)?bias$")
_CONFIG = "config.json"


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder holds a config and files of safetensors."""
    return (folder / _CONFIG).is_file() and any(folder.glob("*.safetensors"))


def config_of(folder: Path) -> dict[str, Any]:
    """The config in a folder. Raises Unfit for one that cannot be read, and for a model that is not known."""
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
        kind = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        rule = f"has a {_CONFIG} that cannot be read ({type(problem).__name__}: {problem})"
        raise Unfit(rule, "a folder that save_pretrained wrote") from problem
    if not isinstance(kind, str) or kind not in _NAMES:
        raise Unfit(f"is a model of model_type {kind}", "|".join(_NAMES))
    assert isinstance(config, dict)
    return config


def heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """(query heads, key and value heads) of a model. Raises Unfit for what can be no heads."""
    queries = config.get("num_attention_heads", config.get("n_head"))
    kv_heads = config.get("num_key_value_heads", queries)
    if type(queries) is int and type(kv_heads) is int and min(queries, kv_heads) > 0 and queries % kv_heads == 0:
        return queries, kv_heads
    rule = f"has a {_CONFIG} of {queries} query heads and {kv_heads} key and value heads"
    raise Unfit(rule, "num_attention_heads=4 num_key_value_heads=2")


def read(folder: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every parameter in full, by its name in the dense model; query, key and value apart, gate and up too.

    Raises Unfit for tensors that are not of this config's model and heads, unreadable files, and without safetensors.
    """
    known, parts = _NAMES[config["model_type"]], dict[str, Tensor]()
    tied = bool(config.get("tie_word_embeddings", known is _GPT2))
    for name, stored in _tensors(folder):
        whole = f"transformer.{name}" if known is _GPT2 and not name.startswith(("transformer.", "lm_head.")) else name
        module, _, leaf = whole.rpartition(".")
        if _BUFFERS.search(whole) or (tied and module == "lm_head"):
            continue
        number = re.search(r"\.(\d+)\.", module)
        ours = known.get(module.replace(f".{number[1]}.", ".#.", 1) if number else module)
        if ours is None:
            raise Unfit(f"holds {name}, which the dense model does not have", "|".join(_NAMES))
        if not stored.is_floating_point() or not 1 <= stored.dim() <= 2:
            rule = f"holds {name} of {stored.dtype} with {stored.dim()} dims, which is no parameter"
            raise Unfit(rule, "vectors and matrices of real numbers")
        turned = known is _GPT2 and ours.startswith("layers.") and not ours.endswith("norm") and leaf == "weight"
        tensor = stored.t().contiguous() if turned else stored  # linears of GPT-2 hold [in, out]
        ours = ours.replace("#", number[1]) if number else ours
        if not ours.endswith(".thirds"):
            parts[f"{ours}.{leaf}"] = tensor
            continue
        if len(tensor) % 3:
            raise Unfit(f"holds c_attn of {len(tensor)} columns", "three times as many")
        for part, third in zip("qkv", tensor.chunk(3), strict=True):
            parts[f"{ours.removesuffix('thirds')}w{part}.{leaf}"] = third
    _check_heads(config, parts)
    return parts


def _check_heads(config: Mapping[str, Any], parts: Mapping[str, Tensor]) -> None:
    """Raise Unfit where queries, keys and values are not of the heads that the config says."""
    queries, kv_heads = heads(config)
    counts = {"wq": queries, "wk": kv_heads, "wv": kv_heads}
    for name, tensor in parts.items():
        part = name.split(".")[-2]
        query = parts.get(name.replace(f".{part}.", ".wq."))
        if part in counts and query is not None:
            stated = config.get("head_dim")
            width = stated if isinstance(stated, int) else len(query) // queries
            if len(tensor) != counts[part] * width:
                rule = f"holds {name} of {len(tensor)} rows, which are not {counts[part]} heads of {width}"
                raise Unfit(rule, f"the heads of its {_CONFIG}")


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        library: Any = importlib.import_module("safetensors.torch")
    except ImportError:
        rule = "is read and written by the package safetensors, which is not installed"
        raise Unfit(rule, "pip install 'shardproof[checkpoints]'") from None
    for file in sorted(folder.glob("*.safetensors")):
        try:
            yield from library.load_file(file).items()
        except Exception as problem:  # torn files raise errors of the library's own
            rule = f"has a file that cannot be read, {file.name} ({type(problem).__name__}: {problem})"
            raise Unfit(rule, "every file as save_pretrained wrote it") from problem
