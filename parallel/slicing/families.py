"""The linears of a layer by model family: their names in a checkpoint of Hugging Face, and what each one is.

    role     weight [out, in]                  cut
    q        heads x head_dim, hidden          rows of the rank's query heads
    k, v     kv_heads x head_dim, hidden       rows of its kv heads
    value    heads x head_dim, hidden          rows of its value heads, where models share query and key (Yuan)
    qkv      all three, hidden                 rows of its heads, in the family's order (`parallel.slicing.heads`)
    out      hidden, heads x head_dim          columns of its query heads (of its value heads); the bias whole
    up       ffn, hidden                       rows of its inner features
    gate_up  2 x ffn, hidden                   rows of its inner features in both halves
    down     hidden, ffn                       columns of its inner features; the bias whole

Norms and embeddings are whole on every rank. Sources: the modeling files of transformers; DeepSpeed 0.19.8
`module_inject/fusedqkv_utils.py` for the orders.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear of a layer: its name there, its role, and whether it has a bias where the model has any."""

    name: str
    role: str
    biased: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture.

    linears    of a layer, in the order of the forward pass
    norms      of a layer, whole; each has a bias where `norm_bias`
    outer      whole parameters outside of the layers, with their shapes in words of the slice
    head       the head's name; its weight is [vocab, hidden], and its bias, if any (`head_bias`), [vocab]
    order      of a fused query/key/value weight
    bias       whether its linears have biases by default
    gated      whether its MLP has a gate
    kv_heads   fixed number of kv heads, None when it follows the query heads
    vocab      rows of the token table by default
    """

    linears: tuple[Linear, ...]
    norms: tuple[str, ...]
    outer: tuple[tuple[str, tuple[str, ...]], ...]
    norm_bias: bool = False
    head: str = "lm_head"
    head_bias: bool = False
    order: str = "blocks"
    bias: bool = False
    gated: bool = False
    kv_heads: int | None = None
    vocab: int = 32000


def _linears(*texts: str) -> tuple[Linear, ...]:
    """Linears written "role name"; a "-" behind the name: never a bias."""
    words = [text.split() for text in texts]
    return tuple(Linear(role=word[0], name=word[1], biased=word[2:] != ["-"]) for word in words)


_TABLE = ("vocab", "hidden")
_QKV_APART = ("q self_attn.q_proj", "k self_attn.k_proj", "v self_attn.v_proj")
_GATED = ("up mlp.gate_proj", "up mlp.up_proj", "down mlp.down_proj")
_4H = ("up mlp.dense_h_to_4h", "down mlp.dense_4h_to_h")
_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_LLAMA_OUTER = (("model.embed_tokens.weight", _TABLE), ("model.norm.weight", ("hidden",)))

FAMILIES: dict[str, Family] = {
    "opt": Family(
        linears=_linears(*_QKV_APART, "out self_attn.out_proj", "up fc1", "down fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        outer=(
            ("model.decoder.embed_tokens.weight", _TABLE),
            ("model.decoder.embed_positions.weight", ("positions", "hidden")),
            ("model.decoder.final_layer_norm.weight", ("hidden",)),
            ("model.decoder.final_layer_norm.bias", ("hidden",)),
        ),
        norm_bias=True,
        bias=True,
        vocab=50272,
    ),
    "llama": Family(
        linears=_linears(*_QKV_APART, "out self_attn.o_proj", *_GATED),
        norms=_LLAMA_NORMS,
        outer=_LLAMA_OUTER,
        gated=True,
    ),
    "yuan": Family(
        linears=_linears(*_QKV_APART[:2], "value self_attn.v_proj", "out self_attn.o_proj", *_GATED),
        norms=_LLAMA_NORMS,
        outer=_LLAMA_OUTER,
        gated=True,
        vocab=135040,
    ),
    "phi3": Family(
        linears=_linears("qkv self_attn.qkv_proj", "out self_attn.o_proj", "gate_up mlp.gate_up_proj", _GATED[-1]),
        norms=_LLAMA_NORMS,
        outer=_LLAMA_OUTER,
        gated=True,
        vocab=32064,
    ),
    "bloom": Family(
        linears=_linears("qkv self_attention.query_key_value", "out self_attention.dense", *_4H),
        norms=_LLAMA_NORMS,
        outer=(
            ("transformer.word_embeddings.weight", _TABLE),
            ("transformer.word_embeddings_layernorm.weight", ("hidden",)),
            ("transformer.word_embeddings_layernorm.bias", ("hidden",)),
            ("transformer.ln_f.weight", ("hidden",)),
            ("transformer.ln_f.bias", ("hidden",)),
        ),
        norm_bias=True,
        order="groups",
        bias=True,
        vocab=250880,
    ),
    "falcon": Family(
        linears=_linears("qkv self_attention.query_key_value", "out self_attention.dense", *_4H),
        norms=("ln_attn", "ln_mlp"),
        outer=(
            ("transformer.word_embeddings.weight", _TABLE),
            ("transformer.ln_f.weight", ("hidden",)),
            ("transformer.ln_f.bias", ("hidden",)),
        ),
        norm_bias=True,
        order="groups",
        vocab=65024,
    ),
    "glm": Family(
        linears=_linears(
            "qkv self_attention.query_key_value",
            "out self_attention.dense -",
            "gate_up mlp.dense_h_to_4h -",
            "down mlp.dense_4h_to_h -",
        ),
        norms=_LLAMA_NORMS,
        outer=(
            ("transformer.embedding.word_embeddings.weight", _TABLE),
            ("transformer.encoder.final_layernorm.weight", ("hidden",)),
        ),
        head="transformer.output_layer",
        bias=True,
        gated=True,
        vocab=65024,
    ),
    "qwen": Family(
        linears=_linears("qkv attn.c_attn", "out attn.c_proj -", "up mlp.w1 -", "up mlp.w2 -", "down mlp.c_proj -"),
        norms=("ln_1", "ln_2"),
        outer=(("transformer.wte.weight", _TABLE), ("transformer.ln_f.weight", ("hidden",))),
        bias=True,
        gated=True,
        vocab=151936,
    ),
    "mpt": Family(
        linears=_linears("qkv attn.Wqkv", "out attn.out_proj", "up ffn.up_proj", "down ffn.down_proj"),
        norms=("norm_1", "norm_2"),
        outer=(("transformer.wte.weight", _TABLE), ("transformer.norm_f.weight", ("hidden",))),
        vocab=50432,
    ),
    "codegen": Family(
        linears=_linears("qkv attn.qkv_proj -", "out attn.out_proj -", "up mlp.fc_in", "down mlp.fc_out"),
        norms=("ln_1",),
        outer=(
            ("transformer.wte.weight", _TABLE),
            ("transformer.ln_f.weight", ("hidden",)),
            ("transformer.ln_f.bias", ("hidden",)),
        ),
        norm_bias=True,
        head_bias=True,
        order="codegen",
        bias=True,
        vocab=51200,
    ),
    "bigcode": Family(
        linears=_linears("qkv attn.c_attn", "out attn.c_proj", "up mlp.c_fc", "down mlp.c_proj"),
        norms=("ln_1", "ln_2"),
        outer=(
            ("transformer.wte.weight", _TABLE),
            ("transformer.wpe.weight", ("positions", "hidden")),
            ("transformer.ln_f.weight", ("hidden",)),
            ("transformer.ln_f.bias", ("hidden",)),
        ),
        norm_bias=True,
        bias=True,
        kv_heads=1,
        vocab=49280,
    ),
}
