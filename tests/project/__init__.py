"""Tests of the repository: its rules, its documents, its recipe for CI."""

import ast
from functools import cache
from pathlib import Path

Nodes = tuple[ast.AST, ...]


def walked(source: str) -> Nodes:
    """Every node of a program, its module first."""
    return tuple(ast.walk(ast.parse(source)))


@cache
def nodes_of(path: Path) -> Nodes:
    """The nodes of a file; all files are parsed once in a process, for all rules."""
    return walked(path.read_text())
