"""The case: one experiment as a frozen, validated value with a one-line text form.

A case names the model, the mode, the mesh degrees, the batch, the training and the dtype. A case holds no tensors and
no behaviour of any implementation. `parallel` imports `reference` as data, never as mathematics. Words of a case are
those of the core (`reference.language.core`) and of all features (`reference.features`).

    >>> str(Case.parse("mode=tp-sp tp=4 kv_heads=4 seed=3"))
    'mode=tp-sp tp=4 kv_heads=4 seed=3'
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shardproof.reference.case.presets import LEADING, PRESETS, resolve_words
from shardproof.reference.case.variants import VARIANTS, lack
from shardproof.reference.errors import CaseError
from shardproof.reference.features import FEATURES, ORDER_NAMES, WORDS
from shardproof.reference.language import rules
from shardproof.reference.language.core import Core
from shardproof.reference.language.groups import Layout
from shardproof.reference.language.words import Meaning, declared_words, describe_words, legal_values, read, write

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
        """Of a few words alone: cases are keys wherever a rank looks something up, and have over a hundred words."""
        return hash((self.mode, self.tp, self.dp, self.pp, self.cp, self.steps, self.micro, self.dtype, self.seed))

    def __post_init__(self) -> None:
        for problems in (rules.problems, *(feature.problems for feature in FEATURES.values())):
            for key, rule, legal in problems(self):
                raise CaseError(key, write(getattr(self, key)), rule, legal)
        if self.variant:
            if self.variant not in VARIANTS:
                raise CaseError("variant", self.variant, "is not a known variant", " ".join(VARIANTS))
            if rule := lack({name: getattr(self, name) for name in WORDS}):
                raise CaseError("variant", self.variant, rule, "variant=")

    @classmethod
    def of(cls, **words: Word) -> "Case":
        """The case that these words describe: preset first, then family, then sizes that follow other sizes."""
        return cls(**resolve_words(words))

    @classmethod
    def parse(cls, text: str) -> "Case":
        """The case written as `key=value` words in any order; later words override earlier ones.

        Raises CaseError: an unknown key, an illegal value, or words that cannot go together.
        """
        return cls.of(**cls.read_words(text))

    @classmethod
    def read_words(cls, text: str) -> dict[str, Word]:
        """The words of a text by key, whatever case they make together. Raises CaseError for an unknown key, and for a
        value that is no number where the key takes one.
        """
        words: dict[str, Word] = {}
        for entry in text.split():
            key, equals, value = entry.partition("=")
            if not equals or key not in WORDS:
                raise CaseError(key, value or entry, "is not a word of the case language", "one of " + " ".join(WORDS))
            words[key] = read(key, value, type(WORDS[key].default))
        return words

    @classmethod
    def check_words(cls, text: str) -> None:
        """Raise CaseError for each that `read_words` raises it for, and for a word that is none of those of its key."""
        for key, value in cls.read_words(text).items():
            known = legal_values(WORDS[key])
            if known and value not in known:
                raise CaseError(key, value, "is not a known word", "|".join(known))

    def but(self, **words: Word) -> "Case":
        """This case with some words changed; what follows others (wp, ffn) follows again. A feature whose axis has one
        rank by these words has its defaults again.
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
