"""Rules of the code: lengths of files and functions, docstrings, no cycle of imports, hidden or not."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests import FOLDERS, INSTALLED, ROOT
from tests.project import Nodes, nodes_of, walked

FILES = sorted(path for folder in (*FOLDERS, "tests") for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    """The import name of a file."""
    top, *_ = parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(("shardproof", *parts) if top in INSTALLED else parts)
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def imports(nodes: Nodes) -> Iterator[str]:
    """Every module named by an import anywhere in the file: in functions, under TYPE_CHECKING, by import_module too."""
    yield from named_in_calls(nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named_in_calls(nodes: Nodes) -> Iterator[str]:
    """The modules that calls of import_module and __import__ name; "" for a name that is built at run time."""
    constants = {
        target.id: node.value.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).split(".")[-1] in IMPORTING:
            word = node.args[0]
            value = word.value if isinstance(word, ast.Constant) else constants.get(getattr(word, "id", ""), "")
            yield str(value)


def graph(files: Mapping[str, Nodes]) -> dict[str, set[str]]:
    return {module: {name for name in imports(nodes) if name in files} - {module} for module, nodes in files.items()}


IMPORTING = ("import_module", "__import__")
BY_NAME = {"shardproof.reference.features"}
"""The file that finds modules of ours by names built at run time: modes and features are files, which no list names."""
OF_OTHERS = {
    "shardproof.parallel.subject": "what reference.features finds, in a copy with a planted bug that of the copy",
    "shardproof.bugs.planting": "copies of modules in which a bug is planted",
    "shardproof.harness.engines.threads.rank_state": "modules that a subject names in per_rank",
    "shardproof.harness.reproducing.repro_script": "a subject, in a script that stands alone",
    "shardproof.harness.resolve": "a subject or another object that is named module:object",
    "shardproof.reference.checkpoints.torch_format": "a class that a checkpoint of torch names",
    "shardproof.harness.running.engines": "engines, at their first use",
    "shardproof.reports.commands.cli": "commands, at their first use",
    "shardproof.reports.commands.doctor": "packages that may be missing",
    "shardproof.suites.subjects.torchtitan_recipe": "the models of torchtitan, which a case names",
    "shardproof": "public names, at their first use",
}
"""Module that imports by names that others give it, or that a table has -> what it imports."""


@cache
def imported() -> dict[str, set[str]]:
    return graph({module: nodes_of(path) for module, path in MODULES.items()})


def test_modules_have_docstrings_files_at_most_450_lines_and_functions_60() -> None:
    assert not [path for path in FILES if path.read_text().count("\n") > 450]
    for path in FILES:
        module, *nodes = nodes_of(path)
        assert isinstance(module, ast.Module) and ast.get_docstring(module), path
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert not [f.name for f in functions if (f.end_lineno or f.lineno) - f.lineno >= 60], path


def names_bound_again(module: ast.AST) -> list[str]:
    """Names that a module's own statements bind a second time: constants, functions, classes."""
    found = Counter[str]()
    assert isinstance(module, ast.Module)
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            overloads = any("overload" in ast.unparse(one) for one in node.decorator_list)
            found[node.name] += not overloads
        elif isinstance(node, ast.Assign) or (isinstance(node, ast.AnnAssign) and node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [one for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            found.update(one.id for one in names if isinstance(one.ctx, ast.Store))
    return [name for name, count in found.items() if count > 1]


def test_a_module_binds_each_of_its_names_once() -> None:
    """If two files are joined and both have a constant of one name, readers of the first silently get the second."""
    assert names_bound_again(ast.parse("_MOST = 1\ndef f(): ...\n_MOST, x = 2, 3\nclass f: ...")) == ["_MOST", "f"]
    assert not [(str(path), again) for path in FILES if (again := names_bound_again(nodes_of(path)[0]))]


def test_no_two_test_files_have_one_name() -> None:
    names = Counter(path.name for path in FILES if path.name.startswith("test_"))
    assert not [name for name, count in names.items() if count > 1]


def test_a_room_of_the_harness_is_seen_at_a_glance() -> None:
    folders = Counter(path.parent for path in FILES if path.is_relative_to(ROOT / "harness"))
    assert not [folder for folder, count in folders.items() if count > 16], "no more than 16 files at one level"


def test_no_import_cycle_hidden_ones_included() -> None:
    order = TopologicalSorter(imported())
    order.prepare()  # raises CycleError
    assert order.is_active()
    for statement in ("import b", "import_module('b')", "importlib.import_module(B)", "__import__('b')"):
        hidden = {"a": walked(f"B = 'b'\ndef f():\n    {statement}"), "b": walked("from a import f")}
        with pytest.raises(CycleError):
            TopologicalSorter(graph(hidden)).prepare()


def test_no_module_of_ours_is_imported_by_a_name_built_at_run_time_but_modes_and_features() -> None:
    built = {module for module, path in MODULES.items() if "" in named_in_calls(nodes_of(path))}
    assert {module for module in built if not module.startswith("tests.")} - OF_OTHERS.keys() == BY_NAME


LATE = re.compile(r"# noqa: PLC0415 *(\([^)]+\))?")


def test_an_import_inside_a_function_is_rare_and_says_why() -> None:
    """Ruff refuses others: a package that may be missing, and what takes long to load and few need."""
    sources = [path.read_text() for path in FILES if path.relative_to(ROOT).parts[0] != "tests"]
    reasons = [found[1] for source in sources for found in LATE.finditer(source)]
    assert None not in reasons and len(reasons) <= 36


@pytest.mark.parametrize("room", ["reference", "parallel", "harness", "reports"])
def test_no_two_folders_import_each_other(room: str) -> None:
    """So the files of a folder are imported by all of its subfolders, or import them."""
    folders: dict[Path, set[Path]] = {}
    for module, targets in imported().items():
        if module.startswith(f"shardproof.{room}."):
            own = MODULES[module].parent
            inside = {MODULES[target].parent for target in targets if target.startswith(f"shardproof.{room}.")}
            folders.setdefault(own, set()).update(inside - {own})
    TopologicalSorter(folders).prepare()  # raises CycleError


def test_no_room_for_leftovers() -> None:
    assert not [p for p in FILES if p.stem in {"utils", "common", "helpers", "base", "misc"}]
    words = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    assert not [f"{p}: {w}" for p in FILES for w in words if w in p.read_text()]
