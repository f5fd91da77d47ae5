"""Named models, the families' defaults, and the sizes that follow from other sizes.

Sources: gpt3-857m is the configuration of NVIDIA's GPT example (its real size is 356 M parameters). InternLM2 from its
published configurations; Llama 3 from "The Llama 3 Herd of Models", table 3. OPT from "OPT: Open Pre-trained
Transformer Language Models", table 1. DeepSeek-V3 from its technical report (arXiv:2412.19437), 4.2; Mixtral from
"Mixtral of Experts" (arXiv:2401.04088), table 1.
"""

from collections.abc import Mapping
from typing import Any

from shardproof.reference.errors import CaseError
from shardproof.reference.features import WORDS
from shardproof.reference.language.core import mlp_width

_GPT = {"family": "gpt", "norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True, "tied": True}
_EVO = {"mode": "mtp", "embedding": "hidden", "delivery": "local"}
_LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": False, "tied": False}
_OPT = {"family": "opt", "norm": "layernorm", "activation": "relu", "positions": "learned", "bias": True, "tied": True}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": _GPT,
    "internlm2": {"family": "internlm2", **_LLAMA},
    "llama": {"family": "llama", **_LLAMA},
    "opt": _OPT,
}


def _shape(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq: int) -> dict[str, int]:
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "vocab": vocab,
        "seq": seq,
    }


def _internlm2(*shape: int) -> dict[str, Any]:
    return {**FAMILIES["internlm2"], **_EVO, **_shape(*shape), "packed": True}


def _llama(*shape: int) -> dict[str, Any]:
    return {**FAMILIES["llama"], **_shape(*shape), "fuse_qkv": False}


_DEEPSEEK_V3 = {
    **_llama(61, 7168, 128, 128, 18432, 129280, 4096),
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_rope_dim": 64, "v_head_dim": 128},
    **{"dense_layers": 3, "experts": 256, "top_k": 8, "expert_ffn": 2048, "shared_ffn": 2048},
    **{"router": "sigmoid", "router_scale": 2.5, "router_groups": 8, "kept_groups": 4},
    **{"bias_rate": 0.001, "sequence_loss": 0.0001, "prediction_depth": 1, "batch": 1},
}
_MIXTRAL = {**_llama(32, 4096, 32, 8, 14336, 32000, 8192), "experts": 8, "top_k": 2, "aux_loss": 0.02, "batch": 1}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny-gpt": {**_GPT, **_shape(2, 64, 8, 2, 256, 509, 32)},
    "tiny-internlm2": _internlm2(2, 64, 8, 2, mlp_width(64, 2.6, 24), 264, 32),
    "gpt3-857m": {**_GPT, **_shape(24, 1024, 16, 16, 4096, 50257, 2048), "batch": 4, "micro": 4},
    "internlm2-1.8b": _internlm2(24, 2048, 16, 8, mlp_width(2048, 4.0, 256), 92544, 2048),
    "internlm2-7b": _internlm2(32, 4096, 32, 8, mlp_width(4096, 3.5, 256), 92544, 2048),
    "internlm2-20b": _internlm2(48, 6144, 48, 8, mlp_width(6144, 8 / 3, 256), 92544, 2048),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248, 128256, 8192),
    "mixtral-8x7b": _MIXTRAL,
    "deepseek-v3": _DEEPSEEK_V3,
    "opt-125m": {**_OPT, **_shape(12, 768, 12, 12, 3072, 50272, 2048)},
}

_FOLLOWERS = {name: field.metadata for name, field in WORDS.items() if field.metadata["follows"]}
LEADING = frozenset(leader for about in _FOLLOWERS.values() for leader in about["follows"]) | {"family"}
"""Words that others follow where these are not given."""
_DEFAULTS = {name: field.default for name, field in WORDS.items()}


def resolve_words(words: Mapping[str, Any]) -> dict[str, Any]:
    """All values of a case from the words given: preset, then family, then the words, then what follows from them.

    Raises CaseError for an unknown preset or family.
    """
    preset = str(words.get("preset", "tiny-gpt"))
    if preset not in PRESETS:
        raise CaseError("preset", preset, "must be a known preset", " ".join(PRESETS))
    values: dict[str, Any] = {**_DEFAULTS, **PRESETS[preset], "preset": preset}
    family = str(words.get("family", values["family"]))
    if family not in FAMILIES:
        raise CaseError("family", family, "must be a known family", " ".join(FAMILIES))
    if family != values["family"]:
        values |= FAMILIES[family]
    values |= words
    for follower, about in _FOLLOWERS.items():
        if follower not in words and any(leader in words for leader in about["follows"]):
            values[follower] = about["value"](values)
    return values
