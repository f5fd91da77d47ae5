"""Known deviations of real systems from the right mathematics, read from `bugs/variants.txt`: which cases show each.

A variant is a word of the case (`variant=NAME`). The dense model ignores it, so a subject that offers a variant must
fail. `parallel.subject` plants it in our implementation.

A condition on the words of a case says which cases can show a planted bug:

    key=value  key=a|b  key!=value  key>n  key<n        n: a number or another key
    key%n=value                                         what is left when n, a number or another key, divides it
"""

import operator
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from shardproof.bugs.record import FOLDER, Bug, read_bugs

_WORD = re.compile(r"([\w%]+)(!=|[=<>])(\S+)")
_ORDER: Mapping[str, Callable[[float, float], bool]] = {"<": operator.lt, ">": operator.gt}


def find_broken_word(condition: str, value: Callable[[str], object]) -> str:
    """The first word of a condition that does not hold, "" if all do; `value` returns the value of a key.

    Raises ValueError for a word that cannot be read.
    """
    return next((word for word in condition.split() if not _holds(word, value)), "")


def _holds(word: str, value: Callable[[str], object]) -> bool:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(f"condition={word}: must be key=value, key!=value, key>n or key<n; legal: tp>2")
    key, sign, limit = match.groups()
    known = _value_of(key, value)
    if sign in _ORDER:
        return _ORDER[sign](float(str(known)), float(str(value(limit) if limit.isidentifier() else limit)))
    number = isinstance(known, int) and not isinstance(known, bool)
    written = [_text(value(part)) if number and part.isidentifier() else part for part in limit.split("|")]
    return (_text(known) in written) == (sign == "=")


def _value_of(key: str, value: Callable[[str], object]) -> object:
    name, _, by = key.partition("%")
    if not by:
        return value(name)
    return int(str(value(name))) % int(str(value(by) if by.isidentifier() else by))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


VARIANTS: dict[str, Bug] = {bug.name: bug for bug in read_bugs(FOLDER / "variants.txt", Bug, {})}
"""Name -> the bug; `stands_for` is its source, `wrong` what deviates, `suite` words that make a case show it."""
_DERIVED: dict[str, tuple[str, Callable[[Mapping[str, Any]], int]]] = {
    "kv_group": ("rows of a kv group", lambda v: (v["heads"] // v["kv_heads"] + 2) * (v["hidden"] // v["heads"])),
    "edp": (
        "ranks that hold the same experts",
        lambda v: v["tp"] * v["cp"] * v["dp"] // (v["ep"] * (v["etp"] or v["tp"])),
    ),
    "table": ("elements of a rank's token table", lambda v: v["vocab"] // v["tp"] * v["hidden"]),
}
"""Number in a condition -> what it is, and its value."""


def lack(values: Mapping[str, Any]) -> str:
    """Words that a case with these values lacks to show its variant, or ""."""
    variant = VARIANTS[values["variant"]]
    if values["mode"] not in variant.modes:
        return f"is a deviation of mode={'|'.join(variant.modes)}, not of mode={values['mode']}"

    def value(key: str) -> object:
        return _DERIVED[key][1](values) if key in _DERIVED else values[key]

    word = find_broken_word(variant.condition, value)
    derived = [f"{key} = {value(key)} {what}" for key, (what, _) in _DERIVED.items() if key in word]
    return word and "; ".join([f"shows with {word} only", *derived])


def nearest_first(name: str) -> list[str]:
    """The names of all variants; one that is spelt almost like this name comes first."""
    near = get_close_matches(name, VARIANTS, 1)
    return [*near, *(other for other in VARIANTS if other not in near)]


def words(name: str) -> dict[str, int | float | bool | str]:
    """The words with which a case of this variant shows it in a mode. Raises ValueError for an unknown name."""
    if name not in VARIANTS:
        raise ValueError(f"variant={name}: is not a known variant; legal: {' '.join(nearest_first(name))}")
    return {**VARIANTS[name].suite, "variant": name}
