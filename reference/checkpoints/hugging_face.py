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

from reference.errors import CaseError

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


def heads(folder: Path) -> tuple[int, int]:
    """(query heads, key and value heads) of the model in a folder. Raises CaseError for a model that is not known."""
    config = _config(folder)
    queries = config.get("num_attention_heads", config.get("n_head"))
    kv_heads = config.get("num_key_value_heads", queries)
    if type(queries) is int and type(kv_heads) is int and min(queries, kv_heads) > 0 and queries % kv_heads == 0:
        return queries, kv_heads
    rule = f"has a {_CONFIG} of {queries} query heads and {kv_heads} key and value heads"
    raise CaseError("load", str(folder), rule, "num_attention_heads=4 num_key_value_heads=2")


def read(folder: Path) -> dict[str, Tensor]:
    """Every parameter in full, by its name in the dense model; query, key and value apart, gate and up too.

    Raises CaseError for an unknown model, for tensors that are not of its heads, unreadable files, and without
    safetensors.
    """
    config, names = _config(folder), dict[str, Tensor]()
    known = _NAMES[config["model_type"]]
    tied = bool(config.get("tie_word_embeddings", config["model_type"] == "gpt2"))
    for name, tensor in _tensors(folder):
        whole = f"transformer.{name}" if known is _GPT2 and not name.startswith(("transformer.", "lm_head.")) else name
        module, _, leaf = whole.rpartition(".")
        if _BUFFERS.search(whole) or (tied and module == "lm_head"):
            continue
        ours = _named(known, module)
        if ours is None:
            raise CaseError(
                "load", str(folder), f"holds {name}, which the dense model does not have", "llama|qwen3|gpt2"
            )
        if not tensor.is_floating_point() or not 1 <= tensor.dim() <= 2:
            rule = f"holds {name} of {tensor.dtype} with {tensor.dim()} dims, which is no parameter"
            raise CaseError("load", str(folder), rule, "vectors and matrices of real numbers")
        names[f"{ours}.{leaf}"] = _turned(config, ours, leaf, tensor).contiguous()
    apart: dict[str, Tensor] = {}
    for name, tensor in names.items():
        if ".thirds." not in name:
            apart[name] = tensor
        elif len(tensor) % 3:
            raise CaseError("load", str(folder), f"holds c_attn of {len(tensor)} columns", "three times as many")
        else:
            parts = zip("qkv", tensor.chunk(3), strict=True)
            apart |= {name.replace(".thirds.", f".w{part}."): value for part, value in parts}
    _check_heads(folder, config, apart)
    return apart


def _check_heads(folder: Path, config: Mapping[str, Any], apart: Mapping[str, Tensor]) -> None:
    """Raise CaseError where queries, keys and values are not of the heads that the config says."""
    counts = dict(zip(("wq", "wk", "wv"), (heads(folder)[0], *2 * heads(folder)[1:]), strict=True))
    for name, tensor in apart.items():
        part = name.split(".")[-2]
        query = apart.get(name.replace(f".{part}.", ".wq."))
        if part in counts and query is not None:
            stated = config.get("head_dim")
            width = stated if isinstance(stated, int) else len(query) // counts["wq"]
            if len(tensor) != counts[part] * width:
                rule = f"holds {name} of {len(tensor)} rows, which are not {counts[part]} heads of {width}"
                raise CaseError("load", str(folder), rule, f"the heads of its {_CONFIG}")


def _turned(config: Mapping[str, Any], module: str, leaf: str, tensor: Tensor) -> Tensor:
    """GPT-2's linears hold [in, out]."""
    linear = module.startswith("layers.") and not module.endswith("norm") and leaf == "weight"
    return tensor.t() if config["model_type"] == "gpt2" and linear else tensor


def _named(known: Mapping[str, str], module: str) -> str | None:
    """Our name of a module of theirs."""
    number = re.search(r"\.(\d+)\.", module)
    ours = known.get(module.replace(f".{number[1]}.", ".#.", 1) if number else module)
    return ours.replace("#", number[1]) if ours and number else ours


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
        kind = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        rule = f"has a {_CONFIG} that cannot be read ({type(problem).__name__}: {problem})"
        raise CaseError("load", str(folder), rule, "a folder that save_pretrained wrote") from problem
    if not isinstance(kind, str) or kind not in _NAMES:
        raise CaseError("load", str(folder), f"is a model of model_type {kind}", "|".join(_NAMES))
    assert isinstance(config, dict)
    return config


def _library(folder: Path) -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        rule = "is read and written by the package safetensors, which is not installed"
        raise CaseError("load", str(folder), rule, "pip install 'shardproof[checkpoints]'") from None


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    library = _library(folder)
    for file in sorted(folder.glob("*.safetensors")):
        try:
            yield from library.load_file(file).items()
        except Exception as problem:  # torn files raise errors of the library's own
            rule = f"has a file that cannot be read, {file.name} ({type(problem).__name__}: {problem})"
            raise CaseError("load", str(folder), rule, "every file as save_pretrained wrote it") from problem
