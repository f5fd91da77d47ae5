"""The words of a slice: which model is cut over how many ranks, and by which of DeepSpeed's two ways.

>>> Sliced.parse("family=opt hidden=768 heads=12 tp=2").head_dim
64
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from shardproof.parallel.slicing.families import FAMILIES, Family
from shardproof.parallel.slicing.heads import SPARE, Heads
from shardproof.reference.case.presets import PRESETS
from shardproof.reference.errors import CaseError
from shardproof.reference.language.core import mlp_width
from shardproof.reference.language.words import LARGEST_SIZE, Meaning, described, read, word

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
        return cls(**_filled(words))

    @classmethod
    def meanings(cls) -> tuple[Meaning, ...]:
        """Every word with its meaning, legal values and default."""
        return described(cls, _KNOWN, _FOLLOWS)


_TYPES: dict[str, type] = {f.name: type(f.default) for f in dataclasses.fields(Sliced)}

_OF_PRESETS = ("family", "hidden", "heads", "kv_heads", "ffn", "vocab", "bias")


def _filled(words: dict[str, Any]) -> dict[str, Any]:
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
