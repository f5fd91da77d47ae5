"""Conditions on the words of a case, as text: which cases can show a planted bug.

key=value  key=a|b  key!=value  key>n  key<n        n: a number or another key
key%n=value                                         what is left when n, a number or another key, divides it
"""

import operator
import re
from collections.abc import Callable, Mapping

_WORD = re.compile(r"([\w%]+)(!=|[=<>])(\S+)")
_ORDER: Mapping[str, Callable[[float, float], bool]] = {"<": operator.lt, ">": operator.gt}


def broken(condition: str, value: Callable[[str], object]) -> str:
    """The first word of a condition that does not hold, "" when all do; `value` gives that of a key.

    Raises ValueError for a word that cannot be read.
    """
    return next((word for word in condition.split() if not _holds(word, value)), "")


def _holds(word: str, value: Callable[[str], object]) -> bool:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(f"condition={word}: must be key=value, key!=value, key>n or key<n; legal: tp>2")
    key, sign, limit = match.groups()
    known = _known(key, value)
    if sign in _ORDER:
        return _ORDER[sign](float(str(known)), float(str(value(limit) if limit.isidentifier() else limit)))
    number = isinstance(known, int) and not isinstance(known, bool)
    written = [_text(value(part)) if number and part.isidentifier() else part for part in limit.split("|")]
    return (_text(known) in written) == (sign == "=")


def _known(key: str, value: Callable[[str], object]) -> object:
    name, _, by = key.partition("%")
    if not by:
        return value(name)
    return int(str(value(name))) % int(str(value(by) if by.isidentifier() else by))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
