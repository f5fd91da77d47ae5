"""Which words of a case one file of `parallel` reads: what meets there can be wrong for some of their values alone.

A property of a case is read for the words that it is found from, and a formula of a row (`CallRow.when`) by its names.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from shardproof import parallel
from shardproof.reference.case import Case
from shardproof.reference.features import WORDS


def words_read_together() -> list[frozenset[str]]:
    """The words of every file."""
    files = sorted(Path(parallel.__path__[0]).rglob("*.py"))
    return [frozenset().union(*map(_words, _read_of_a_case(ast.parse(file.read_text())))) for file in files]


def _read_of_a_case(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of = node.value
            if "case" in (of.id if isinstance(of, ast.Name) else of.attr if isinstance(of, ast.Attribute) else ""):
                yield node.attr
        elif isinstance(node, ast.keyword) and node.arg == "when" and isinstance(node.value, ast.Constant):
            names = ast.walk(ast.parse(str(node.value.value), mode="eval"))
            yield from (name.id for name in names if isinstance(name, ast.Name))


@cache
def _words(name: str) -> frozenset[str]:
    """The words that a property of a case is found from; of a word itself, and of no property none."""
    found = inspect.getattr_static(Case, name, None)
    if name in WORDS or not isinstance(found, property) or not found.fget:
        return frozenset({name} & WORDS.keys())
    tree = ast.parse(textwrap.dedent(inspect.getsource(found.fget)))
    read = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr != name)
    own = (node.attr for node in read if isinstance(node.value, ast.Name) and node.value.id == "self")
    return frozenset().union(*map(_words, own))
