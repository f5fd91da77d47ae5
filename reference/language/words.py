"""The words of the case language: how one is declared, its metadata, and how its value is read and written."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

from shardproof.reference.errors import CaseError

SPLIT, MODEL, DATA, TRAFFIC, TRAINING = (
    "how the work is split",
    "the model",
    "the data",
    "which collectives are issued",
    "the training",
)
"""The groups of words, in the order in which a case is printed."""
LARGEST_SIZE = 2**31 - 1
"""The largest value of an integer word other than the seed: torch and numpy take it as a size everywhere."""
Problem = tuple[str, str, str]
"""A key, the rule that its value breaks, a legal value."""
Field = dataclasses.Field[Any]
_Value = TypeVar("_Value")
_LEGAL = {bool: "true|false", int: "at least 1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """A word of the case language. `default` is written as in a case; "" means that there is none.

    `follows` are the words from which the value is derived when one of them is given and this word is not.
    """

    name: str
    group: str
    meaning: str
    legal: str
    default: str
    follows: tuple[str, ...] = ()


def word(
    default: _Value,
    meaning: str,
    *,
    legal: str | Collection[str] = "",
    domain: tuple[_Value, ...] | None = None,
    group: str = "",
    after: str = "",
    axis: int = 0,
    follows: tuple[str, ...] = (),
    value: Callable[[Mapping[str, Any]], Any] | None = None,
    dense: object = None,
    part: bool = False,
) -> _Value:
    """A dataclass field with this default and meaning.

    legal    the legal values, or a text about them if the type does not say enough
    domain   the values of a number that experiments draw, the plainest first; () if they do not change the word
    group    the name of a group that begins with this word
    after    the word after which this one is printed; "": after the one declared before it
    axis     if not 0, the word is the size of a mesh axis; axes are ordered by this number, the fastest first
    follows  words from which `value` derives this one, if one of them is given and this one is not
    dense    the value that the dense model gets in place of any other; None: it gets the word itself
    part     a model has the class's feature only if this word is not at its default
    """
    about = {
        "default": default,
        "meaning": meaning,
        "legal": legal,
        "domain": domain,
        "group": group,
        "after": after,
        "axis": axis,
        "follows": follows,
        "value": value,
        "dense": dense,
        "part": part,
    }
    return dataclasses.field(default=default, metadata=about)


def declared_words(owner: type) -> dict[str, Field]:
    """The words that a class declares itself, in its order."""
    return {name: field for name, field in vars(owner).items() if isinstance(field, dataclasses.Field)}


@functools.cache
def _defaults(owner: Any) -> tuple[Callable[[object], object], object, tuple[tuple[str, Any], ...]]:
    """A function that reads all words of a feature from a case, its result for the defaults, and the defaults."""
    defaults = tuple((name, field.default) for name, field in declared_words(owner).items())
    own = tuple(value for _, value in defaults)
    return attrgetter(*(name for name, _ in defaults)), own if len(own) > 1 else own[0], defaults


def not_default(owner: Any, case: object) -> Iterator[tuple[str, str]]:
    """Every word of a feature (a class) that is not at its default, with the default as a case writes it."""
    read_words, plain, defaults = _defaults(owner)
    if read_words(case) == plain:
        return
    for name, default in defaults:
        if getattr(case, name) != default:
            yield name, f"{name}={write(default)}"


def legal_values(field: Field) -> tuple[str, ...]:
    """The list of a field's legal values; () if it has none."""
    legal = field.metadata["legal"]
    return () if isinstance(legal, str) else tuple(legal)


def describe_words(
    case: type, known: Mapping[str, tuple[str, ...]], follows: Mapping[str, tuple[str, ...]]
) -> tuple[Meaning, ...]:
    """The words of a case class in the order of its fields.

    `known` are lists of legal values that fields do not have, `follows` words to follow that fields do not name.
    """
    found: list[Meaning] = []
    group = ""
    for field in dataclasses.fields(case):
        about: Mapping[str, Any] = field.metadata
        group = about["group"] or group
        values, default = "|".join(known.get(field.name, legal_values(field))), about["default"]
        found.append(
            Meaning(
                name=field.name,
                group=group,
                meaning=about["meaning"],
                legal=values or about["legal"] or _LEGAL[type(field.default)],
                default=write(default),
                follows=follows.get(field.name, about["follows"]),
            )
        )
    return tuple(found)


def read(key: str, text: str, kind: type) -> int | float | bool | str:
    """The value that `text` writes for a key of this type. Raises CaseError (a ValueError) for an invalid text."""
    if kind is bool:
        if text not in ("true", "false"):
            raise CaseError(key, text, "must be true or false", f"{key}=true")
        return text == "true"
    if kind is str:
        return text
    plain = text if text.isascii() and "_" not in text else ""  # Python reads 1_0 as 10, and digits of every script
    try:
        value: int | float = kind(plain)
    except ValueError:
        legal = f"{key}=1" if kind is int else f"{key}=0.1"
        raise CaseError(key, text, f"must be {'a whole' if kind is int else 'a'} number", legal) from None
    return value


def write(value: int | float | bool | str) -> str:
    """The text that `read` turns into this value."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def multiple(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit
