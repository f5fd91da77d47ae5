"""The house keeps its rules: lengths of files and functions, docstrings, import directions, no cycle, hidden or not."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests import ROOT

ROOMS = {
    "reference": {"reference"},
    "harness": {"harness"},
    "parallel": {"parallel", "reference"},
    "reports": {"reports", "harness"},
    "shardproof": {"shardproof", "reports", "parallel", "harness", "reference"},
    "suites": {"suites", "shardproof", "reports", "parallel", "harness", "reference"},
    "bench": {"bench", "suites", "shardproof", "reports", "parallel", "harness", "reference"},
    "tests": {"tests", "bench", "suites", "shardproof", "reports", "parallel", "harness", "reference"},
}
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module named by an import anywhere in the file: function-local and TYPE_CHECKING ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph(trees: Mapping[str, ast.AST]) -> dict[str, set[str]]:
    return {module: {name for name in imports(tree) if name in trees} - {module} for module, tree in trees.items()}


TREES: dict[str, ast.AST] = {module_of(path): ast.parse(path.read_text()) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_file_is_read_in_one_sitting(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "every module says what it is responsible for"
    assert text.count("\n") <= 300
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [f.name for f in functions if (f.end_lineno or f.lineno) - f.lineno >= 60]
    assert not long, "functions are at most 60 lines"


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES if path.is_relative_to(ROOT / "harness")}))
def test_a_room_of_the_harness_is_seen_at_a_glance(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= 16, "no more than 16 files at one level"


def test_imports_follow_the_direction_of_the_house() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, targets in graph(TREES).items()
        for target in targets
        if target.split(".")[0] not in ROOMS[module.split(".")[0]]
    ]
    assert not wrong


def test_no_import_cycle_hidden_ones_included() -> None:
    order = TopologicalSorter(graph(TREES))
    order.prepare()  # raises CycleError
    assert order.is_active()


def test_the_cycle_test_sees_a_hidden_cycle() -> None:
    hidden = {"a": ast.parse("def f():\n    import b"), "b": ast.parse("from a import f")}
    with pytest.raises(CycleError):
        TopologicalSorter(graph(hidden)).prepare()


def test_no_room_for_leftovers() -> None:
    assert not [p for p in FILES if p.stem in {"utils", "common", "helpers", "base", "misc"}]
    words = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    assert not [f"{p}: {w}" for p in FILES for w in words if w in p.read_text()]
