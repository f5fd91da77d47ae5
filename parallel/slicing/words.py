"""The words of a slice: which model is cut over how many ranks, and in which of DeepSpeed's two ways.

>>> Sliced.parse("family=opt hidden=768 heads=12 tp=2").head_dim
64

A model family names the linears of a layer as in a checkpoint of Hugging Face, and gives each a role:

    role     weight [out, in]                  the part of one rank
    q        heads x head_dim, hidden          rows of the rank's query heads
    k, v     kv_heads x head_dim, hidden       rows of its kv heads
    value    heads x head_dim, hidden          rows of its value heads, where models share query and key (Yuan)
    qkv      all three, hidden                 rows of its heads, in the family's order (`parallel.slicing.rows`)
    out      hidden, heads x head_dim          columns of its query heads (of its value heads); the bias whole
    up       ffn, hidden                       rows of its inner features
    gate_up  2 x ffn, hidden                   rows of its inner features in both halves
    down     hidden, ffn                       columns of its inner features; the bias whole

Norms and embeddings are whole on every rank. Sources: the modeling files of transformers; DeepSpeed 0.19.8
`module_inject/fusedqkv_utils.py` for the orders.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from shardproof.parallel.slicing.rows import SPARE, Heads
from shardproof.reference.case.case import PRESETS
from shardproof.reference.errors import CaseError
from shardproof.reference.language.core import mlp_width
from shardproof.reference.language.words import LARGEST_SIZE, Meaning, describe_words, read, word


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear of a layer: its name in the layer, its role, and whether it has a bias in a model with biases."""

    name: str
    role: str
    biased: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture.

    linears    the linears of a layer, in the order of the forward pass
    norms      the norms of a layer, which are whole; they have biases if `norm_bias`
    outer      whole parameters outside of the layers, with their shapes in words of the slice
    head       the head's name; its weight is [vocab, hidden], and its bias, if any (`head_bias`), [vocab]
    order      the order of rows in a fused query/key/value weight (`parallel.slicing.rows`)
    bias       whether linears have biases by default
    gated      whether the MLP has a gate
    kv_heads   the fixed number of kv heads; None when it follows the query heads
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
    """Linears from texts "role name"; a third word "-" means that the linear never has a bias."""
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


PATHS = ("autotp", "container")
CONTAINERS = ("opt", "llama")
"""Families with a container here; the other families are cut by AutoTP."""
_KNOWN: dict[str, tuple[str, ...]] = {
    "preset": tuple(name for name, words in PRESETS.items() if words["family"] in FAMILIES and "experts" not in words),
    "family": tuple(FAMILIES),
    "path": PATHS,
    "head": ("sum", "gather"),
    "spare": SPARE,
}
_FOLLOWS = {
    "kv_heads": ("heads", "family"),
    "head_dim": ("hidden", "heads"),
    "ffn": ("hidden", "family"),
    "vocab": ("family",),
    "bias": ("family",),
    "path": ("family",),
    "spare": ("family",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliced:
    """A model and how it is cut; `parse` reads it and fills gaps. Raises CaseError for what cannot be."""

    preset: str = word("", "a named model; words behind it override its own", group="the model")
    family: str = word("opt", "architecture: names and roles of its tensors")
    hidden: int = word(768, "width of the hidden states")
    heads: int = word(12, "query heads")
    kv_heads: int = word(12, "key and value heads; divides heads")
    head_dim: int = word(64, "features of a head; hidden / heads by default")
    ffn: int = word(3072, "inner width of the MLP")
    vocab: int = word(50272, "rows of the token table")
    positions: int = word(2050, "rows of the table of positions, where there is one (OPT has 2 more than tokens)")
    bias: bool = word(True, "linears have biases, those that the family gives one")
    tp: int = word(2, "ranks that share the model", group="the cut")
    path: str = word(
        "container", "container: kernel injection, weights [in, out], q, k and v fused; autotp: each linear [out, in]"
    )
    grain: int = word(1, "features that are never separated, of tensors that do not follow heads (path=autotp)")
    spare: str = word("refuse", "fewer kv heads than ranks: refuse; leave ranks empty; or copy kv heads (path=autotp)")
    head: str = word("sum", "sum: the head cut by columns, logits summed (inference); gather: by rows (training)")

    def __post_init__(self) -> None:
        for key, known in _KNOWN.items():
            if getattr(self, key) not in known and not (key == "preset" and not self.preset):
                raise CaseError(key, getattr(self, key), "is not a known word", "|".join(known))
        for key in ("hidden", "head_dim", "ffn", "vocab", "positions", "tp", "grain"):
            if getattr(self, key) < 1:
                raise CaseError(key, getattr(self, key), "must be at least 1", f"{key}=1")
        for key in (field.name for field in dataclasses.fields(self) if field.type is int):
            if getattr(self, key) > LARGEST_SIZE:
                raise CaseError(key, getattr(self, key), f"must be at most {LARGEST_SIZE}", f"{key}={LARGEST_SIZE}")
        if self.path == "container" and self.family not in CONTAINERS:
            raise CaseError("path", self.path, f"has no container of family={self.family}", "path=autotp")
        if self.path == "container" and self.spare != "refuse":
            raise CaseError("spare", self.spare, "is a choice of path=autotp", "spare=refuse")
        _ = self.attention

    @property
    def attention(self) -> Heads:
        """Its heads."""
        return Heads(query=self.heads, kv=self.kv_heads, size=self.head_dim)

    @property
    def architecture(self) -> Family:
        """Its family."""
        return FAMILIES[self.family]

    @classmethod
    def parse(cls, text: str) -> "Sliced":
        """The model of these `key=value` words in any order; later ones override. Raises CaseError for a wrong one."""
        words: dict[str, Any] = {}
        for entry in text.split():
            key, equals, value = entry.partition("=")
            if not equals or key not in _TYPES:
                raise CaseError(key, value or entry, "is not a word of a slice", "one of " + " ".join(_TYPES))
            words[key] = read(key, value, _TYPES[key])
        return cls(**_fill_words(words))

    @classmethod
    def meanings(cls) -> tuple[Meaning, ...]:
        """Every word with its meaning, legal values and default."""
        return describe_words(cls, _KNOWN, _FOLLOWS)


_TYPES: dict[str, type] = {f.name: type(f.default) for f in dataclasses.fields(Sliced)}

_OF_PRESETS = ("family", "hidden", "heads", "kv_heads", "ffn", "vocab", "bias")


def _fill_words(words: dict[str, Any]) -> dict[str, Any]:
    """The words, those of their preset, and what follows from them."""
    if words.get("preset") in _KNOWN["preset"]:
        named = {key: PRESETS[words["preset"]][key] for key in _OF_PRESETS}
        words = {**named, **words}
    values: dict[str, Any] = {"family": "opt", "hidden": 768, "heads": 12, **words}
    family = FAMILIES.get(values["family"], FAMILIES["opt"])
    hidden, heads = values["hidden"], values["heads"]
    if "head_dim" not in values and (heads < 1 or hidden % heads):
        raise CaseError("heads", heads, f"must divide hidden={hidden} unless head_dim is given", "heads=1")
    follow = {
        "kv_heads": family.kv_heads or heads,
        "head_dim": hidden // max(heads, 1),
        "ffn": mlp_width(hidden, 8 / 3, 8) if family.gated else 4 * hidden,
        "vocab": family.vocab,
        "bias": family.bias,
        "path": "container" if values["family"] == "opt" else "autotp",
        "spare": "replicate" if family.kv_heads else "refuse",
    }
    return follow | values
