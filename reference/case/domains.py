"""The domain of every word of a case: the values that stand for all that it can have, the plainest first.

Experiments on a failing case choose from these (harness.running.experiments).
"""

from typing import Any

from shardproof.reference.features import WORDS
from shardproof.reference.language.words import Field, legal_values


def domains() -> dict[str, tuple[Any, ...]]:
    """Every word that has several values, or names a file, with its values, the plainest first."""
    found = {word: _values(field) for word, field in WORDS.items()}
    return {word: values for word, values in found.items() if values}


def _values(field: Field) -> tuple[Any, ...]:
    default, domain = field.default, field.metadata["domain"]
    if domain is not None:
        return tuple(domain)
    if isinstance(default, bool):
        return (default, not default)
    others = (value for value in legal_values(field) if value != default)
    return (default, *others) if legal_values(field) or default == "" else ()
