"""Names to objects: "module:object" as users write it, with one message for each way to get it wrong.

Our own subjects are found in the same way, so that the harness imports neither the reference nor any implementation.
"""

import ast
import difflib
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from shardproof.harness.errors import RequestError, error_text, install_text

_EMPTY = "it defines nothing; legal: subject(case, device) in it, as `shardproof new-subject FILE` writes"
_MOST = 6
"""The most names of a file that a message lists."""
_OF_SUBJECTS = ("truth", "words", "cases")
"""Attributes that show that an object is meant as a subject: it has at least one."""
_ARGUMENTS = 2
"""A subject takes a case and a device."""


def resolve(name: str) -> object:
    """The object that "package.module:object" names; "a.b:c.d" reaches an attribute of c.

    The working directory is searched as `python -m` does, so that a user's own file needs no installation. Raises
    RequestError for a malformed name, a module that is missing or fails on import, or a missing attribute.
    """
    module_name, colon, path = name.partition(":")
    if reason := _why_misspelt(module_name, path, colon):
        raise RequestError(f"name {name!r}: {reason}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import_module(name, module_name)
    found: object = module
    for part in path.split("."):
        if not hasattr(found, part):
            alternative = _propose_alternative(found, part, module_name)
            raise RequestError(f"name {name!r}: {module_name} has no {part!r}; {alternative}")
        found = getattr(found, part)
    return found


def _why_misspelt(module_name: str, path: str, colon: str = ":") -> str:
    """Why this is no name of an object, with what to type; "" if it is one. Nothing is imported."""
    if module_name.endswith(".py"):
        return _of_file(Path(module_name), path)
    for part in module_name.split("."):
        if part[:1].isdigit() or "-" in part:
            why = "begins with a digit" if part[:1].isdigit() else "has a hyphen"
            other = f"{'subject_' * part[:1].isdigit()}{part.replace('-', '_')}"
            legal = f"rename it to {other} and write {other}:{path or 'subject'}"
            return f"{part!r} {why}, which no name of a Python module may; legal: {legal}"
    if not path or not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        callables = [] if colon else _list_callables(Path(f"{module_name.replace('.', '/')}.py"))
        legal = f"{module_name}:{callables[0]}" if callables else "shardproof.parallel.subject:subject"
        return f"must be written module:object; legal: {legal}"
    return ""


def _of_file(file: Path, path: str) -> str:
    """Words for the name of a file in place of an object: its module, and the names that it defines."""
    rule = "is a file, and a name is written module:object"
    if not file.is_file():
        return "must be written module:object, and there is no such file; legal: shardproof.parallel.subject:subject"
    inside = Path(os.path.relpath(file))
    if (parts := inside.with_suffix("").parts)[0] == os.pardir or file.is_absolute():
        rule, parts = f"{rule}, in the folder of the file ({file.resolve().parent})", (file.stem,)
    if reason := _why_misspelt(".".join(parts), path or "subject"):
        return reason
    module, callables = ".".join(parts), _list_callables(file)
    names = [path] if path in callables else callables
    others = f"; it defines {', '.join(names[:_MOST])}" if len(names) > 1 else ""
    return f"{rule}; legal: {module}:{names[0] if names else 'subject'}{others if names else f'; {_EMPTY}'}"


def _list_callables(file: Path) -> list[str]:
    """The names that a file seems to define for use as a subject, likely ones first. The file is read, not run."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return []
    defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assigned = [
        target.id
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    called = [node.name for node in body if isinstance(node, ast.FunctionDef) and len(node.args.args) == _ARGUMENTS]
    likely = [name for name in ("subject",) if name in {*defined, *assigned}]
    return [*dict.fromkeys(name for name in (*likely, *called, *defined) if not name.startswith("_"))]


def _propose_alternative(target: object, part: str, module_name: str) -> str:
    """A legal name: a similar one of the module, else a subject, else any of these."""
    words = {word: getattr(target, word) for word in dir(target) if not word.startswith("_")}
    own = [
        word
        for word, value in words.items()
        if not isinstance(value, ModuleType) and getattr(value, "__module__", module_name) == module_name
    ]
    likely = [word for word in own if word == "subject" or any(hasattr(words[word], one) for one in _OF_SUBJECTS)]
    likely.sort(key=lambda word: word != "subject")
    close = difflib.get_close_matches(part, own, n=1)
    legal = close or likely or difflib.get_close_matches(part, own, n=1, cutoff=0.0)
    return f"legal: {module_name}:{legal[0]}" if legal else _EMPTY


def _import_module(name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        if _is_missing(problem, module_name):
            where = "the working directory and the installed packages"
            raise RequestError(f"name {name!r}: there is no module {problem.name!r} in {where}") from problem
        advice = install_text(problem)
        why = f"{problem}{f'; {advice}' if advice else ''}"
        raise RequestError(f"name {name!r}: {module_name} fails on import: {why}") from problem
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # importing a user's module may raise anything, sys.exit too
        raise RequestError(f"name {name!r}: {module_name} fails on import: {error_text(problem)}") from problem


def _is_missing(problem: ModuleNotFoundError, module_name: str) -> bool:
    """Whether this module is missing, or a package that contains it."""
    return f"{module_name}.".startswith(f"{problem.name}.")
