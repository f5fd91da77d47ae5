"""The house keeps its rules: lengths of files and functions, docstrings, import directions, no cycle, hidden or not."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests import ROOT

ROOMS = {
    "bugs": {"bugs"},
    "reference": {"reference", "bugs"},
    "harness": {"harness"},
    "parallel": {"parallel", "reference", "bugs"},
    "reports": {"reports", "harness"},
    "shardproof": {"shardproof", "reports", "parallel", "harness", "reference", "bugs"},
    "suites": {"suites", "shardproof", "reports", "parallel", "harness", "reference", "bugs"},
    "bench": {"bench", "suites", "shardproof", "reports", "parallel", "harness", "reference", "bugs"},
    "tests": {"tests", "bench", "suites", "shardproof", "reports", "parallel", "harness", "reference", "bugs"},
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


@cache
def trees() -> dict[str, ast.Module]:
    return {module_of(path): ast.parse(path.read_text()) for path in FILES}


def test_every_module_says_what_it_is_responsible_for() -> None:
    assert not [module for module, tree in trees().items() if not ast.get_docstring(tree)]


def test_files_have_at_most_300_lines_and_functions_60() -> None:
    assert not [path for path in FILES if path.read_text().count("\n") > 300]
    functions = [
        (module, node)
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert not [f"{module}.{f.name}" for module, f in functions if (f.end_lineno or f.lineno) - f.lineno >= 60]


def test_no_two_test_files_have_one_name() -> None:
    names = Counter(path.name for path in FILES if path.name.startswith("test_"))
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES if path.is_relative_to(ROOT / "harness")}))
def test_a_room_of_the_harness_is_seen_at_a_glance(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= 16, "no more than 16 files at one level"


def test_imports_follow_the_direction_of_the_house() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, targets in graph(trees()).items()
        for target in targets
        if target.split(".")[0] not in ROOMS[module.split(".")[0]]
    ]
    assert not wrong


def test_no_import_cycle_hidden_ones_included() -> None:
    order = TopologicalSorter(graph(trees()))
    order.prepare()  # raises CycleError
    assert order.is_active()


def test_the_cycle_test_sees_a_hidden_cycle() -> None:
    hidden = {"a": ast.parse("def f():\n    import b"), "b": ast.parse("from a import f")}
    with pytest.raises(CycleError):
        TopologicalSorter(graph(hidden)).prepare()


@pytest.mark.parametrize("room", ["reference", "parallel", "harness", "reports"])
def test_no_two_folders_import_each_other(room: str) -> None:
    """The files of a folder are above all of its rooms, or below all of them."""
    paths = {module_of(path): path for path in FILES if path.is_relative_to(ROOT / room)}
    folders: dict[Path, set[Path]] = {}
    for module, targets in graph({module: trees()[module] for module in paths}).items():
        own = paths[module].parent
        folders.setdefault(own, set()).update({paths[target].parent for target in targets} - {own})
    TopologicalSorter(folders).prepare()  # raises CycleError


def test_no_room_for_leftovers() -> None:
    assert not [p for p in FILES if p.stem in {"utils", "common", "helpers", "base", "misc"}]
    words = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    assert not [f"{p}: {w}" for p in FILES for w in words if w in p.read_text()]
