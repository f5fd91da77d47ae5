"""Cases in a subject's own words: axes, a few words that every training has, and the words of `subject.words`.

    >>> known = Vocabulary.of({"width": 12, "act": ("gelu", "relu"), "micro": 3})
    >>> case = known.parse("tp=2 dp=3 act=relu")
    >>> case.width, case.act, case.world_size, str(case)
    (12, 'relu', 6, 'tp=2 dp=3 act=relu')

No rule of our decoder holds for such a case, and no torch is loaded.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardproof.harness.mesh_axes import AXES, EXPERT_AXES, PIPELINE, WITH_EXPERTS_APART

Word: TypeAlias = "int | float | bool | str"
COMMON: Mapping[str, tuple[Word, ...]] = {
    "steps": (2,),
    "micro": (2,),
    "dtype": ("float64", "float32", "bfloat16", "float16"),
    "seed": (0,),
}
"""Words that every case has: the default first, then other legal values if only some are legal."""
_AT_MOST: Mapping[str, int] = {**dict.fromkeys((*AXES, *EXPERT_AXES, "steps", "micro"), 2**31 - 1), "seed": 2**64 - 1}
_LARGEST = 2**63 - 1
"""The range of a subject's own integers: that of an element of a tensor of integers."""
_AT_LEAST: Mapping[str, int] = {**dict.fromkeys((*AXES, *EXPERT_AXES), 1), "steps": 1, "micro": 1, "seed": 0}


class WordError(ValueError):
    """A word that no case can have. Names the word, the value, the rule and a legal value."""

    def __init__(self, key: str, value: object, rule: str, legal: object) -> None:
        super().__init__(f"{key}={_write_value(value)}: {rule}; legal: {legal}")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words of a subject's cases: word -> values, the default first.

    `closed` words have no other legal values; any other word takes every value of its type.
    """

    words: tuple[tuple[str, tuple[Word, ...]], ...]
    closed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, own: Mapping[str, Any]) -> "Vocabulary":
        """The vocabulary of `subject.words`: word -> its default, or a tuple of its legal values, the default first.

        A tuple of one value allows no other. A word may be one that every case has, with another default, {"micro": 3},
        or with fewer values: {"micro": (1,)}. Raises TypeError for anything but such a mapping.
        """
        if not isinstance(own, Mapping):
            raise TypeError(f"words={own!r} must map words to defaults; legal: {_LEGAL}")
        words: dict[str, tuple[Word, ...]] = {**dict.fromkeys(AXES, (1,)), **COMMON}
        closed = {"dtype"}
        for key, value in own.items():
            listed = isinstance(value, tuple | list)
            values = tuple(value) if listed else (value,)
            _require(key, value, values)
            words[key] = tuple(dict.fromkeys(values if listed or key != "dtype" else (*values, *COMMON[key])))
            closed |= {key} if listed else set()
        return cls(tuple(words.items()), frozenset(closed))

    def takes(self, key: str, value: Word) -> bool:
        """Whether a case may have this value of a word that it has."""
        return key not in self.closed or value in dict(self.words)[key]

    def parse(self, text: str, shared: Mapping[str, Word] | None = None) -> "PlainCase":
        """The case of a text of `word=value`; later words override earlier ones. Raises WordError.

        `shared` words have the values of another case where the text does not state them, in any dtype.
        """
        stated = dict(shared or {})
        for word in text.split():
            key, equals, value = word.partition("=")
            if not equals:
                raise WordError(word, "", "must be a word and its value", "tp=2")
            stated[key] = self._read_word(key, value)
        return self.case(stated, any_dtype=shared is not None)

    def case(self, stated: Mapping[str, Word], *, any_dtype: bool = False) -> "PlainCase":
        """The case with these words, and the defaults of all others; `any_dtype`: also in a dtype that no word allows.

        Raises WordError.
        """
        known = dict(self.words)
        for key, value in stated.items():
            if key not in known:
                raise WordError(key, value, "is no word of this subject's cases", " ".join(known))
            if type(value) is not type(known[key][0]):
                raise WordError(key, value, f"must be of type {type(known[key][0]).__name__}", known[key][0])
            if not self.takes(key, value) and not (any_dtype and key == "dtype" and value in COMMON[key]):
                raise self.foreign(key, value)
            _require_bounds(key, value)
        values = {key: stated.get(key, legal[0]) for key, legal in self.words}
        made = PlainCase(vocabulary=self, values=tuple(values.items()))
        made.require_expert_axes()
        return made

    def foreign(self, key: str, value: Word) -> WordError:
        """The error of a value that its word does not allow."""
        return WordError(key, value, "is none of its values", "|".join(map(_write_value, dict(self.words)[key])))

    def _read_word(self, key: str, text: str) -> Word:
        known = dict(self.words)
        if key not in known:
            raise WordError(key, text, "is no word of this subject's cases", " ".join(known))
        kind = type(known[key][0])
        if kind is bool:
            if text not in ("true", "false"):
                raise WordError(key, text, "must be true or false", f"{key}=true")
            return text == "true"
        try:
            if kind is not str and (not text.isascii() or "_" in text):  # Python reads 1_0 as 10
                raise ValueError(text)
            return kind(text)
        except ValueError:
            rule = "must be a whole number" if kind is int else "must be a number"
            raise WordError(key, text, rule, f"{key}={known[key][0]}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainCase:
    """An experiment in a subject's own words, each an attribute; `str(case)` parses back to an equal case."""

    vocabulary: Vocabulary
    values: tuple[tuple[str, Word], ...]

    def __getattr__(self, name: str) -> Any:
        """The value of a word. Raises AttributeError with the words that exist."""
        if name.startswith("_") or name in ("vocabulary", "values"):
            raise AttributeError(name)
        values = dict(self.values)
        if name not in values:
            raise AttributeError(f"case has no word {name}; its words: {' '.join(values)}")
        return values[name]

    @property
    def mode(self) -> str:
        """The word `mode` if the subject has one, else the axes of more than one rank: "tp", "dp+tp", "one"."""
        values = dict(self.values)
        if "mode" in values:
            return str(values["mode"])
        return "+".join(axis for axis in sorted((*AXES, *EXPERT_AXES)) if values.get(axis, 1) != 1) or "one"

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return int(dict(self.values)["steps"])

    @property
    def micro(self) -> int:
        """Micro-batches of a step, on each data rank."""
        return int(dict(self.values)["micro"])

    @property
    def dtype(self) -> str:
        """Name of the dtype of parameters, activations and collectives: "float64"."""
        return str(dict(self.values)["dtype"])

    @property
    def seed(self) -> int:
        """Seed of weights and data."""
        return int(dict(self.values)["seed"])

    @property
    def world_size(self) -> int:
        """The number of ranks: the product of all axes but those of experts, which have the same ranks."""
        return math.prod(self._dense_sizes.values())

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Mesh axis -> ranks in each of its groups, fastest axis first; then those of experts, if there are any."""
        return {**self._dense_sizes, **self._expert_sizes}

    @property
    def axes(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Mesh axis -> the rank lists of its groups."""
        lists = {}
        for axis, (stride, size) in self._strides.items():
            firsts = [rank for rank in range(self.world_size) if rank // stride % size == 0]
            lists[axis] = tuple(tuple(range(first, first + stride * size, stride)) for first in firsts)
        return lists

    def axis_rank(self, axis: str, rank: int) -> int:
        """The place of a global rank in its group along an axis. Raises KeyError for an unknown axis."""
        stride, size = self._strides[axis]
        return rank // stride % size

    @property
    def _dense_sizes(self) -> dict[str, int]:
        values = dict(self.values)
        return {axis: int(values[axis]) for axis in AXES}

    @property
    def _expert_sizes(self) -> dict[str, int]:
        """etp, ep and edp, fastest first; {} without a word for them."""
        values, dense = dict(self.values), self._dense_sizes
        if not set(EXPERT_AXES) & values.keys():
            return {}
        sizes = {"etp": int(values.get("etp", dense["tp"])), "ep": int(values.get("ep", 1))}
        return {**sizes, "edp": math.prod(dense[axis] for axis in WITH_EXPERTS_APART) // math.prod(sizes.values())}

    @property
    def _strides(self) -> dict[str, tuple[int, int]]:
        """Mesh axis -> the distance of neighbours in a group, and the group's size."""
        found = {}
        for sizes in (self._dense_sizes, self._expert_sizes):
            stride = 1
            for axis, size in sizes.items():
                found[axis] = stride, size
                stride *= size
        return found

    def require_expert_axes(self) -> None:
        """Raises WordError if experts cannot be split evenly over the ranks of a stage."""
        stage = self.world_size // self._dense_sizes[PIPELINE]
        for axis, size in self._expert_sizes.items():
            if axis != "edp" and stage % size:
                raise WordError(axis, size, f"must divide tp * cp * dp, {stage}", f"{axis}=1")
            stage //= size or 1

    def samples(self, step: int, micro: int, dp_rank: int, batch: int) -> range:
        """The numbers of the samples in a micro-batch of `batch` samples on a data rank; no number occurs twice.

        The same samples make up a step for every factorisation of dp * micro. Data drawn from these numbers alone are
        the same global batch with one rank (truth = "alone") as with many.
        """
        number = (step * self.micro + micro) * self.axis_sizes["dp"] + dp_rank
        return range(number * batch, (number + 1) * batch)

    @property
    def defaults(self) -> dict[str, Word]:
        """Every word and its default."""
        return {key: legal[0] for key, legal in self.vocabulary.words}

    def words(self) -> dict[str, Word]:
        """Every word and its value."""
        return dict(self.values)

    @property
    def text_by_word(self) -> dict[str, str]:
        """Every word and its value as a case has it in its text."""
        return {key: _write_value(value) for key, value in self.values}

    def but(self, **words: Word) -> "PlainCase":
        """This case with some words changed. Raises WordError for a word or a value that no case of the subject has.

        In any dtype: the truth is computed in float64, whatever dtypes the subject takes (`harness.subject.refusal`).
        """
        return self.vocabulary.case({**dict(self.values), **words}, any_dtype=True)

    def __str__(self) -> str:
        defaults = self.defaults
        words = [f"{key}={_write_value(value)}" for key, value in self.values if value != defaults[key]]
        return " ".join(words) or f"{AXES[0]}={dict(self.values)[AXES[0]]}"


_KINDS: frozenset[type] = frozenset({int, float, bool, str})
_LEGAL = "{'width': 12, 'act': ('gelu', 'relu')}"


def _require(key: Any, value: object, values: tuple[Any, ...]) -> None:
    """Raise TypeError unless these can be the values of a word; `value` is what the subject stated."""
    kinds = {type(one) for one in values}
    if not isinstance(key, str) or not key.isidentifier() or len(kinds) != 1 or not kinds <= _KINDS:
        rule = "a word is a name, its values, one at least, are numbers, booleans or text of one type"
        raise TypeError(f"words[{key!r}]={value!r}: {rule}; legal: {_LEGAL}")
    if key in EXPERT_AXES and kinds != {int}:
        raise TypeError(f"words[{key!r}]={value!r}: the ranks of an axis are a whole number; legal: {{{key!r}: 1}}")
    if key not in (*AXES, *COMMON, "mode") and hasattr(PlainCase, key):
        raise TypeError(f"words[{key!r}]: every case has an attribute of this name; legal: another word")
    if any(not str(one) or any(sign in str(one) for sign in " \t\n=") for one in values):
        raise TypeError(f"words[{key!r}]={value!r}: a value is text without spaces or =; legal: {_LEGAL}")
    common = COMMON.get(key, (1,) if key in AXES else ())
    if common and kinds != {type(common[0])} or len(common) > 1 and not set(values) <= set(common):
        legal = f"one of {', '.join(map(repr, common))}" if len(common) > 1 else "a whole number"
        raise TypeError(
            f"words[{key!r}]={value!r}: every case has this word, {legal}; legal: {{{key!r}: {common[0]!r}}}"
        )
    for one in values:
        try:
            _require_bounds(key, one)
        except WordError as problem:
            raise TypeError(f"words[{key!r}]={value!r}: {problem}") from None


def _require_bounds(key: str, value: Word) -> None:
    """Raise WordError for a number that is too small or too large for its word."""
    if key in _AT_LEAST and value < _AT_LEAST[key]:  # type: ignore[operator]
        raise WordError(key, value, f"must be at least {_AT_LEAST[key]}", f"{key}={_AT_LEAST[key]}")
    most = _AT_MOST.get(key, _LARGEST)
    if type(value) is int and abs(value) > most:
        raise WordError(key, value, f"must be at most {most}", f"{key}={most}")


def _write_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
