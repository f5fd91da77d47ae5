"""Docstrings use the verbs of the field: check, compare, record, report, raise, return."""

from __future__ import annotations

import ast
import re

from tests import ROOT

PRIVATE = re.compile(
    r"\b(tells?|told|telling|ask(s|ed|ing)?|nobody|anybody|everybody|so much|so many)\b", re.IGNORECASE
)
PLAIN = ("shardproof", "reference", "parallel", "reports")
FILES = sorted(path for room in PLAIN for path in (ROOT / room).rglob("*.py"))


def private_words(text: str) -> list[str]:
    """The private words in the docstrings of a file."""
    if not PRIVATE.search(text):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return [found[0] for text in texts for found in PRIVATE.finditer(text)]


def test_docstrings_are_plain() -> None:
    assert [f"{path.relative_to(ROOT)}: {word}" for path in FILES for word in private_words(path.read_text())] == []


def test_a_private_word_is_seen() -> None:
    assert private_words('"""Told."""\ndef f():\n    """Nobody asks."""') == ["Told", "Nobody", "asks"]
    assert private_words('"""A task is retold."""\nasked = 1') == []
