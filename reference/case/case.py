"""The case: one experiment as a frozen, validated value with a one-line text form, and the models that have names.

A case names the model, the mode, the mesh degrees, the batch, the training and the dtype. It holds no tensors and
nothing that an implementation does. `parallel` imports `reference` as data, never as mathematics. Words of a case are
those of the core (`reference.language.core`) and of all features (`reference.features`).

    >>> str(Case.parse("mode=tp-sp tp=4 kv_heads=4 seed=3"))
    'mode=tp-sp tp=4 kv_heads=4 seed=3'

Sources: gpt3-857m is the configuration of NVIDIA's GPT example (its real size is 356 M parameters). InternLM2 from its
published configurations; Llama 3 from "The Llama 3 Herd of Models", table 3. OPT from "OPT: Open Pre-trained
Transformer Language Models", table 1. DeepSeek-V3 from its technical report (arXiv:2412.19437), 4.2; Mixtral from
"Mixtral of Experts" (arXiv:2401.04088), table 1.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

from shardproof.reference.case.variants import VARIANTS, lack, nearest_first
from shardproof.reference.errors import CaseError
from shardproof.reference.features import FEATURES, ORDER_NAMES, WORDS
from shardproof.reference.language import rules
from shardproof.reference.language.core import Core, mlp_width
from shardproof.reference.language.groups import Layout
from shardproof.reference.language.words import Meaning, declared_words, describe_words, legal_values, read, write

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
"""Words from which the values of other words are derived, unless those are given too."""
_DEFAULTS = {name: field.default for name, field in WORDS.items()}


def resolve_words(words: Mapping[str, Any]) -> dict[str, Any]:
    """All values of a case. The preset's come first; another family's, the given words, and the values that follow from
    these words replace them in this order.

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


Word = int | float | bool | str
if TYPE_CHECKING:
    _Words = Core  # words of features are found by name: to the type checker they are `Core.__getattr__`
else:
    _Words = dataclasses.make_dataclass(
        "Words",
        [(name, type(field.default), field) for name, field in WORDS.items()],
        bases=(*FEATURES.values(), Core),
        frozen=True,
        kw_only=True,
        slots=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Case(_Words):
    """An experiment. The plain constructor fills gaps with `tiny-gpt`; `of` and `parse` know presets and families.

    Raises CaseError (a ValueError) naming the key, the value, the rule and a legal value.
    """

    order_names: ClassVar[tuple[str, ...]] = ORDER_NAMES

    if TYPE_CHECKING:

        def __init__(self, **words: Any) -> None:
            """The case with these words."""

    def __hash__(self) -> int:
        """A hash of a few words: cases have over a hundred, and are keys in caches that ranks use all the time."""
        return hash((self.mode, self.tp, self.dp, self.pp, self.cp, self.steps, self.micro, self.dtype, self.seed))

    def __post_init__(self) -> None:
        for problems in (rules.problems, *(feature.problems for feature in FEATURES.values())):
            for key, rule, legal in problems(self):
                raise CaseError(key, write(getattr(self, key)), rule, legal)
        if self.variant:
            if self.variant not in VARIANTS:
                raise CaseError(
                    "variant", self.variant, "is not a known variant", " ".join(nearest_first(self.variant))
                )
            if rule := lack({name: getattr(self, name) for name in WORDS}):
                raise CaseError("variant", self.variant, rule, "variant=")

    @classmethod
    def of(cls, **words: Word) -> "Case":
        """The case with these words; other values are those of its preset and family, or follow from the words."""
        return cls(**resolve_words(words))

    @classmethod
    def parse(cls, text: str) -> "Case":
        """The case written as `key=value` words in any order; later words override earlier ones.

        Raises CaseError: an unknown key, an illegal value, or words that cannot go together.
        """
        return cls.of(**cls.read_words(text))

    @classmethod
    def read_words(cls, text: str) -> dict[str, Word]:
        """The words of a text by key, also if they make no legal case together. Raises CaseError for an unknown key, a
        key without a value, and a value that is not of the key's type.
        """
        words: dict[str, Word] = {}
        for entry in text.split():
            key, equals, value = entry.partition("=")
            if key not in WORDS:
                near = get_close_matches(key, WORDS, cutoff=0.7) or [*WORDS][:8]
                legal = f"{' '.join(near)} and the others of `shardproof help case`"
                raise CaseError(key, value or entry, "is not a word of the case language", legal)
            if not equals:
                raise CaseError(key, "", "has no value", f"{key}={write(getattr(cls.of(), key))}")
            words[key] = read(key, value, type(WORDS[key].default))
        return words

    @classmethod
    def check_words(cls, text: str) -> None:
        """Raise CaseError as `read_words` does, and for a word that is not in the list of its key's legal words."""
        for key, value in cls.read_words(text).items():
            known = legal_values(WORDS[key])
            if known and value not in known:
                raise CaseError(key, value, "is not a known word", "|".join(known))

    def but(self, **words: Word) -> "Case":
        """This case with some words changed. Values that follow from others (wp, ffn) are derived anew. If the words
        set the size of a feature's axis to 1, its other words have their defaults again.
        """
        alone = {
            name
            for own in map(declared_words, FEATURES.values())
            if any(field.metadata["axis"] and words.get(axis) == 1 for axis, field in own.items())
            for name in own
        }
        kept = {key: value for key, value in self.words().items() if key not in alone}
        return Case.of(**{**kept, **words})

    def words(self) -> dict[str, Word]:
        """The words that differ from the defaults: the shortest dict that `of` turns into this case."""
        words: dict[str, Word] = {}
        if self.preset != WORDS["preset"].default:
            words["preset"] = self.preset
        values = resolve_words(words)
        for name in WORDS:
            mine = getattr(self, name)
            if values[name] != mine:
                words[name] = mine
                values = resolve_words(words) if name in LEADING else {**values, name: mine}
        return words

    @classmethod
    def meanings(cls) -> tuple[Meaning, ...]:
        """Every word of the case language with its meaning, legal values and default, in the order of `str`."""
        return describe_words(cls, {"preset": tuple(PRESETS), "variant": tuple(VARIANTS)}, {})

    def __str__(self) -> str:
        return " ".join(f"{key}={write(value)}" for key, value in self.words().items())

    @property
    def layout(self) -> Layout:
        """The rank orders over this case's ranks."""
        return _layout(self)


@functools.lru_cache(maxsize=64)
def _layout(case: Case) -> Layout:
    return super(Case, case).layout
