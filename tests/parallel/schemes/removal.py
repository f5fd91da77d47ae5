"""Every place in `parallel` where a collective is issued, and our subject without the call of one such place.

A site is one call of a raw collective (`parallel.communication.collectives`) in the source of another module.
`without(site)` plants the stand-in of `absent` there, on every rank alike, and leaves all else as it is.
"""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import parallel
from bugs.planting import planted, source_of
from tests.parallel.schemes import absent

__all__ = ["CallSite", "sites", "source_without", "without"]

_RAW = "parallel.communication.collectives"
_APART = (_RAW,)
"""The collectives themselves."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CallSite:
    """One call of the raw collective `name` in `module`, at `line`:`column`, inside the function `within`."""

    module: str
    line: int
    column: int
    name: str
    within: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('parallel.')}:{self.within}:{self.name}:{self.line}"


def sites() -> list[CallSite]:
    """All sites of all modules of `parallel`, in the order of the source."""
    modules = [info.name for info in pkgutil.walk_packages(parallel.__path__, "parallel.") if info.name not in _APART]
    return sorted(site for module in modules for site in _sites(module, ast.parse(source_of(module))))


def without(site: CallSite, subject: str = "parallel.subject:subject") -> Callable[..., Any]:
    """Our subject in which this one call is not issued."""
    return planted(source_without(site), subject)


def source_without(site: CallSite) -> dict[str, str]:
    """The source of the site's module with the stand-in in place of the call."""
    tree = ast.parse(source_of(site.module))
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (node.lineno, node.col_offset) == (site.line, site.column):
            name = _called(node, aliases)
            if name == site.name:
                node.func = ast.Attribute(ast.Name("_absent", ast.Load()), name, ast.Load())
    tree.body.insert(_first_import(tree), ast.parse(f"import {absent.__name__} as _absent").body[0])
    return {site.module: ast.unparse(ast.fix_missing_locations(tree))}


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> raw collective, for what the module imports from `parallel.communication.collectives`."""
    known = set(absent.__all__)
    return {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == _RAW
        for alias in node.names
        if alias.name in known
    }


def _called(node: ast.Call, aliases: dict[str, str]) -> str:
    return aliases.get(node.func.id, "") if isinstance(node.func, ast.Name) else ""


def _sites(module: str, tree: ast.Module) -> Iterator[CallSite]:
    aliases = _aliases(tree)

    def walk(node: ast.AST, within: str) -> Iterator[CallSite]:
        for child in ast.iter_child_nodes(node):
            inside = within
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inside = f"{within}.{child.name}".lstrip(".")
            if isinstance(child, ast.Call) and (name := _called(child, aliases)):
                yield CallSite(module=module, line=child.lineno, column=child.col_offset, name=name, within=within)
            yield from walk(child, inside)

    yield from walk(tree, "")


def _first_import(tree: ast.Module) -> int:
    """Where an import may stand: behind the docstring and the __future__ imports."""
    return next(i for i, node in enumerate(tree.body) if isinstance(node, ast.Import | ast.ImportFrom)) + 1
