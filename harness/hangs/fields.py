"""Fields of a dump, which others wrote: each is of its type, or a TypeError; pickles hold plain values."""

import io
import pickle
from typing import Any


class _Plain(pickle._Unpickler):  # in Python: the one in C takes any number of gigabytes for an index that a file says
    """Unpickles dicts, lists, texts and numbers, and nothing that has a class."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, which is no plain value")


def pickled(content: bytes) -> dict[str, Any]:
    """The dict of plain values in a pickle. Raises TypeError for another value, and anything for a torn file."""
    found = _Plain(io.BytesIO(content)).load()
    if not isinstance(found, dict):
        raise TypeError("it must hold one dict")
    return found


def number(value: Any) -> int:
    """A whole number that fits in 64 bits. Raises TypeError for another value, as all of these do."""
    if type(value) is not int or abs(value) >= 2**63:
        raise TypeError(f"a {type(value).__name__} where a whole number must be")
    return value


def text(value: Any) -> str:
    """A text. Raises TypeError for another value."""
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where a text must be")
    return value


def listed(value: Any) -> list[Any] | tuple[Any, ...]:
    """A list of anything. Raises TypeError for another value."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"a {type(value).__name__} where a list must be")
    return value


def numbers(value: Any) -> tuple[int, ...]:
    """A list of whole numbers. Raises TypeError for another value."""
    return tuple(map(number, listed(value)))
