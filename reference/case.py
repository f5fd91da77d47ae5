"""The case: one experiment as a frozen, validated value with a one-line text form.

A case names the model, the mode, the mesh degrees, the batch, the training and the dtype. It holds no tensors and no
behaviour of any implementation: `reference` and `parallel` share it, and nothing else but parameter names.

Sizes count elements; `seq` is tokens per sequence, `batch` sequences per micro-batch and data rank, `micro`
micro-batches per step.

    >>> str(Case.parse("mode=tp-sp tp=4 kv_heads=4 seed=3"))
    'mode=tp-sp tp=4 kv_heads=4 seed=3'
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from reference import rules
from reference.presets import FAMILIES, FOLLOWS, PRESETS, follow
from reference.rules import CaseError

__all__ = ["Case", "CaseError"]

Word = int | float | bool | str


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One experiment. The plain constructor fills gaps with `tiny-gpt`; `of` and `parse` know presets and families.

    Raises CaseError (a ValueError) naming the key, the value, the rule and a legal value.
    """

    preset: str = "tiny-gpt"
    # the split
    mode: str = "tp"
    tp: int = 2
    dp: int = 1
    pp: int = 1
    cp: int = 1
    wp: int = 1
    # the model
    family: str = "gpt"
    layers: int = 2
    hidden: int = 64
    heads: int = 8
    kv_heads: int = 2
    activation: str = "gelu"
    ffn: int = 256
    vocab: int = 509
    positions: str = "learned"
    norm: str = "layernorm"
    bias: bool = True
    tied: bool = True
    qk_norm: bool = False
    fuse_qkv: bool = True
    fuse_mlp: bool = False
    # the data
    seq: int = 32
    batch: int = 2
    micro: int = 2
    packed: bool = False
    data: str = ""
    delivery: str = "tensors"
    attention_mask: bool = True
    # how the mode talks
    embedding: str = "vocab"
    head: str = "parallel"
    cross_entropy: str = "unfused"
    fuse_weights: bool = False
    recompute: str = "none"
    overlap: bool = True
    metric: bool = False
    # the training
    steps: int = 2
    optimizer: str = "sgd"
    lr: float = 1.0
    clip: float = 0.0
    dropout: float = 0.0
    label_smoothing: float = 0.0
    dtype: str = "float64"
    seed: int = 0
    variant: str = ""

    def __post_init__(self) -> None:
        rules.check({name: getattr(self, name) for name in _TYPES} | {"preset": self.preset})

    @classmethod
    def of(cls, **words: Word) -> Case:
        """The case that these words describe: preset first, then family, then sizes that follow other sizes."""
        values = _resolve(words)
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case written as `key=value` words in any order; later words override earlier ones."""
        words: dict[str, Word] = {}
        for word in text.split():
            key, equals, value = word.partition("=")
            if not equals or key not in _TYPES:
                raise CaseError(key, value or word, "is not a word of the case language", "one of " + " ".join(_TYPES))
            words[key] = rules.read(key, value, _TYPES[key])
        return cls.of(**words)

    def but(self, **words: Word) -> Case:
        """This case with some words changed; sizes that follow others (wp, ffn, ...) follow again unless said."""
        return Case.of(**{**self.words(), **words})

    def words(self) -> dict[str, Word]:
        """The words that differ from the defaults: the shortest dict that `of` turns into this case."""
        words: dict[str, Word] = {}
        if self.preset != "tiny-gpt":
            words["preset"] = self.preset
        for name in _TYPES:
            mine = getattr(self, name)
            if _resolve(words)[name] != mine:
                words[name] = mine
        return words

    def __str__(self) -> str:
        return " ".join(f"{key}={rules.write(value)}" for key, value in self.words().items())

    @property
    def world_size(self) -> int:
        """Ranks: tp * dp * pp * cp."""
        return self.tp * self.dp * self.pp * self.cp

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def padded_vocab(self) -> int:
        """Rows of the sharded vocabulary: gpt pads to a multiple of 128 * tp (Megatron), the others never pad.

        Under isp of 128 * lcm(tp, wp): tp splits the logits, wp the weights.
        """
        if self.family != "gpt":
            return self.vocab
        unit = 128 * math.lcm(self.tp, self.wp)
        return -(-self.vocab // unit) * unit

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one data rank."""
        return self.batch * self.seq

    @property
    def axes(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Mesh axis -> the rank lists of its groups. Order tp, cp, dp, pp, fastest first (Megatron 4.8)."""
        axes: dict[str, tuple[tuple[int, ...], ...]] = {}
        for sizes in self._meshes():
            axes |= rules.rank_lists(sizes)
        return axes

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Mesh axis -> ranks in each of its groups: what `axes` says, without listing the ranks."""
        return {axis: size for sizes in self._meshes() for axis, size in sizes.items()}

    def axis_rank(self, axis: str, rank: int) -> int:
        """The place of a global rank in its group along an axis; what `axes` says, without listing the ranks."""
        for sizes in self._meshes():
            stride = 1
            for name, size in sizes.items():
                if name == axis:
                    return rank // stride % size
                stride *= size
        raise KeyError(axis)

    def _meshes(self) -> tuple[dict[str, int], ...]:
        """The meshes over this case's ranks, each axis with its size, fastest first: weights have their own in isp."""
        own = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        if self.mode != "isp":
            return (own,)
        return own, {"wp": self.wp, "wdp": self.tp * self.cp * self.dp // self.wp, "pp": self.pp}


def _resolve(words: dict[str, Word]) -> dict[str, Any]:
    """All values of a case from the words given: preset, then family, then the words, then what follows from them."""
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
    for follower, leaders in FOLLOWS.items():
        if follower not in words and any(leader in words for leader in leaders):
            values[follower] = follow(follower, values)
    return values


_TYPES: dict[str, type] = {f.name: type(f.default) for f in dataclasses.fields(Case)}
"""Every word of the case language and its type, in the order that `str` prints them."""
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Case) if f.name != "preset"}
