"""What each word of the case language means: declared beside its default in `Case`, printed by `help case`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["DATA", "MODEL", "SPLIT", "TRAFFIC", "TRAINING", "Meaning", "described", "word"]

SPLIT, MODEL, DATA, TRAFFIC, TRAINING = (
    "how the work is split",
    "the model",
    "the data",
    "which collectives are issued",
    "the training",
)
"""The groups of words, in the order in which a case is printed."""
_Value = TypeVar("_Value")
_LEGAL = {bool: "true|false", int: "at least 1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """One word of the case language. `default` is written as in a case, "" is no value; `follows` are the words from
    which the value is derived when one of them is given and this word is not.
    """

    name: str
    group: str
    meaning: str
    legal: str
    default: str
    follows: tuple[str, ...] = ()


def word(default: _Value, meaning: str, *, legal: str = "", group: str = "") -> _Value:
    """A dataclass field with this default and meaning; `group` opens a group that the following words belong to.

    `legal` is needed only where neither the type nor the list of known words says what may be written.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, "legal": legal, "group": group})


def described(
    case: type, known: Mapping[str, tuple[str, ...]], follows: Mapping[str, tuple[str, ...]]
) -> tuple[Meaning, ...]:
    """The words of a case class in the order of its fields.

    `known` are the legal values of the words that take one of a list, `follows` the leaders of those that have any.
    """
    found: list[Meaning] = []
    group = ""
    for field in dataclasses.fields(case):
        about: Mapping[str, Any] = field.metadata
        group = about["group"] or group
        values = "|".join(known.get(field.name, ()))
        found.append(
            Meaning(
                name=field.name,
                group=group,
                meaning=about["meaning"],
                legal=values or about["legal"] or _LEGAL[type(field.default)],
                default=str(field.default).lower() if isinstance(field.default, bool) else str(field.default),
                follows=follows.get(field.name, ()),
            )
        )
    return tuple(found)
