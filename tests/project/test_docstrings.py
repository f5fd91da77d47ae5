"""The docstring of a public function that raises names every exception that stands behind a `raise` in it."""

import ast
from collections.abc import Iterator

from tests import ROOT
from tests.project import nodes_of

RAISING = ("parallel", "reference", "shardproof", "bench", "bugs", "suites", "reports", "harness", "docs")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public(body: list[ast.stmt], about: str = "") -> Iterator[tuple[Function, str]]:
    """Public functions and methods with their docstrings; a special method may be described by its class."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node.body, ast.get_docstring(node) or "")
        elif isinstance(node, Function):
            special = node.name.startswith("__")
            if special or not node.name.startswith("_"):
                yield node, (ast.get_docstring(node) or "") + (about if special else "")


def raised(function: Function) -> Iterator[str]:
    """The class of each exception raised in the function itself; "Raises" for one that a function of ours makes."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef | ast.Lambda):
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Raise) and node.exc is not None and not isinstance(node.exc, ast.Name):
            name = ast.unparse(node.exc).partition("(")[0].rpartition(".")[2]
            yield name if name[0].isupper() else "Raises"


def silent(module: ast.AST) -> list[str]:
    """The functions of a module that raise what their docstring does not name."""
    return [
        f"{function.name}: {name}"
        for function, about in public(getattr(module, "body", []))
        for name in sorted(set(raised(function)))
        if name not in about and not (name == "Raises" and "Raise " in about)
    ]


def test_a_public_function_names_what_it_raises() -> None:
    paths = [path for folder in RAISING for path in (ROOT / folder).rglob("*.py")]
    checked = [path for path in paths if not path.name.startswith("test_")]
    assert [f"{path}: {name}" for path in checked for name in silent(nodes_of(path)[0])] == []


def test_the_rule_sees_functions_methods_classes_and_makers() -> None:
    text = '''
def one():
    """Nothing."""
    raise ValueError("x") from None
class Thing:
    """Raises KeyError for anything."""
    def __init__(self): raise KeyError(1)
    def two(self):
        """Raises KeyError."""
        raise errors.RequestError("x").with_traceback(None)
    def three(self): raise _failed()
    def _four(self): raise ValueError("x")
    def five(self):
        """Again."""
        try: pass
        except Exception: raise
def six():
    """Makes one."""
    def inner(): raise ValueError("x")
    return inner
'''
    assert silent(ast.parse(text)) == ["one: ValueError", "two: RequestError", "three: Raises"]
