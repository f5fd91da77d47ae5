"""Finds the lines that a bug changes: by the name of a function and by text, wherever the function is now."""

import ast
import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from shardproof.bugs.record import Change

_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|\w+|\S')
_CLOSING = frozenset(")]}")


class AnchorLost(ValueError):
    """A bug whose lines are nowhere, or in several places."""


def change_sources(name: str, changes: tuple[Change, ...]) -> dict[str, str]:
    """Module -> its source with all of these changes. Raises AnchorLost, which names the bug and its place."""
    texts: dict[str, str] = {}
    for change in changes:
        try:
            at = find_change(change, texts)
        except AnchorLost as lost:
            raise AnchorLost(f"{name}: {lost}") from None
        texts[at.module] = apply_change(texts.get(at.module) or source_of(at.module), at)
    return texts


def find_change(change: Change, texts: dict[str, str] | None = None, *, renamed: bool = False) -> Change:
    """The change at the place where the lines are now: the stated one, or else the one function of that name that has
    them.

    With `renamed` it is the one function of any name. `texts` are sources that are changed already. Raises AnchorLost.
    """
    known = texts or {}
    count = _matches(change, known) if _spec(change.module) else 0
    if count == 1:
        return change
    if count > 1:
        raise AnchorLost(f"{change}: the lines to change are there {count} times, must be once: {change.old!r}")
    last = change.within.rpartition(".")[2]
    moved = []
    for module in modules_of(package_of(change.module)):
        for within in sorted({"", *functions(known.get(module) or source_of(module))} if change.within else {""}):
            elsewhere = replace(change, module=module, within=within)
            if (renamed or within.rpartition(".")[2] == last) and _matches(elsewhere, known) == 1:
                moved.append(elsewhere)
    inner = [one for one in moved if not any(_inside(other, one) for other in moved)]
    if len(inner) != 1:
        places = f"in {', '.join(map(str, inner))}" if inner else "nowhere else"
        raise AnchorLost(f"{change}: the lines to change are not there, and {places}: {change.old!r}")
    return inner[0]


def package_of(module: str) -> str:
    """The package of a module that is copied or searched as a whole: `shardproof.parallel`."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "shardproof" else 1])


def apply_change(text: str, change: Change) -> str:
    """The source with this change. The lines must be there once."""
    (start, end), *_ = _occurrences(text, change)
    line = text[text.rfind("\n", 0, start) + 1 : start]
    indent = line[: len(line) - len(line.lstrip())] if line.strip() else line
    first, *others = change.new.split("\n")
    return text[:start] + "\n".join([first, *(indent + other for other in others)]) + text[end:]


@lru_cache(maxsize=64)  # a module is read for every bug in it
def functions(text: str) -> dict[str, list[tuple[int, int]]]:
    """Qualified name of each function and class -> where its text begins and ends."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    places: dict[str, list[tuple[int, int]]] = {}

    def walk(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{child.name}".lstrip(".")
                first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                places.setdefault(name, []).append((starts[first - 1], starts[child.end_lineno or first]))
            walk(child, name)

    walk(ast.parse(text), "")
    return places


def source_of(module: str) -> str:
    """The source text of a module, read without importing it. Raises ValueError for a module without source."""
    spec = _spec(module)
    if spec is None or not spec.has_location or spec.origin is None:
        raise ValueError(f"module={module}: has no source; legal: shardproof.parallel.layers.linear")
    return Path(spec.origin).read_text(encoding="utf-8")


def _spec(module: str) -> ModuleSpec | None:
    """Where a module is; no package above it is imported."""
    top, *parts = module.split(".")
    spec = importlib.util.find_spec(top)
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        top = f"{top}.{part}"
        spec = PathFinder.find_spec(top, spec.submodule_search_locations)
    return spec


@cache
def modules_of(package: str) -> tuple[str, ...]:
    """Every module of a package, by path alone."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return ()
    return tuple(_below(list(spec.submodule_search_locations), f"{package}."))


def _below(paths: list[str], prefix: str) -> Iterator[str]:
    for info in pkgutil.iter_modules(paths, prefix):
        yield info.name
        if info.ispkg:
            yield from _below([f"{path}/{info.name.rpartition('.')[2]}" for path in paths], f"{info.name}.")


def _matches(change: Change, texts: dict[str, str]) -> int:
    return len(_occurrences(texts.get(change.module) or source_of(change.module), change))


def _occurrences(text: str, change: Change) -> list[tuple[int, int]]:
    """Where the old lines begin and end in the function."""
    pattern = _pattern(change.old)
    if pattern.search(text) is None:
        return []
    spans = functions(text).get(change.within, []) if change.within else [(0, len(text))]
    return [match.span() for start, end in spans for match in pattern.finditer(text, start, end)]


@cache
def _pattern(old: str) -> re.Pattern[str]:
    """A pattern for these lines, whatever their white space, line breaks and trailing commas are."""
    tokens = _TOKEN.findall(old)
    parts = []
    for number, token in enumerate(tokens):
        before, after = tokens[number - 1] if number else "", tokens[number + 1] if number + 1 < len(tokens) else ""
        if token == "," and after in _CLOSING:
            continue  # the closing one asks for it
        gap = r"\s+" if before[-1:].isidentifier() and token[0].isidentifier() else r"\s*"
        parts.append("" if not before else r"\s*,?\s*" if token in _CLOSING else gap)
        parts.append(re.escape(token))
    head = r"(?<!\w)" if tokens[0][0].isidentifier() else ""
    tail = r"(?!\w)" if tokens[-1][-1].isidentifier() else ""
    return re.compile(head + "".join(parts) + tail)


def _inside(inner: Change, outer: Change) -> bool:
    """Whether a function lies inside another one."""
    if inner.module != outer.module or inner.within == outer.within:
        return False
    return not outer.within or inner.within.startswith(f"{outer.within}.")
