"""Names to objects: "module:object" as users write it, each way to get it wrong with one message.

Our own subjects enter by this door too, so that the harness imports neither the reference nor any implementation.
"""

import difflib
import importlib
import os
import sys
from types import ModuleType

from harness.errors import RequestError, error_text

_EMPTY = "it defines nothing; legal: subject(case, device) in it, as `shardproof new-subject FILE` writes"


def resolve(name: str) -> object:
    """The object that "package.module:object" names; "a.b:c.d" reaches an attribute of c.

    The working directory is searched as `python -m` does, so that a user's own file needs no installation. Raises
    RequestError for a malformed name, a module that is missing or fails on import, or a missing attribute.
    """
    module_name, colon, path = name.partition(":")
    if not colon or not path or not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        raise RequestError(f"name {name!r}: must be written module:object; legal: parallel.subject:subject")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _module(name, module_name)
    found: object = module
    for part in path.split("."):
        if not hasattr(found, part):
            if found is module:  # a module of the user may have the name of one of ours
                found = _elsewhere(module_name)
            if not hasattr(found, part):
                alternative = _alternative(found, part, module_name)
                raise RequestError(f"name {name!r}: {module_name} has no {part!r}; {alternative}")
        found = getattr(found, part)
    return found


def _alternative(target: object, part: str, module_name: str) -> str:
    """A name that would have been legal: the closest of the module's own, rather than of what it imports."""
    words = {word: getattr(target, word) for word in dir(target) if not word.startswith("_")}
    own = [
        word
        for word, value in words.items()
        if not isinstance(value, ModuleType) and getattr(value, "__module__", module_name) == module_name
    ]
    close = difflib.get_close_matches(part, own, n=1, cutoff=0.0)
    return f"legal: {module_name}:{close[0]}" if close else _EMPTY


def _module(name: str, module_name: str) -> ModuleType:
    try:
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as problem:
            if not _lacks(problem, module_name):
                raise
        return _elsewhere(module_name)
    except ModuleNotFoundError as problem:
        if _lacks(problem, module_name):
            where = "the working directory and the installed packages"
            raise RequestError(f"name {name!r}: there is no module {problem.name!r} in {where}") from problem
        raise RequestError(f"name {name!r}: {module_name} fails on import: {problem}") from problem
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # whatever a user's module raises while it is imported, sys.exit too
        raise RequestError(f"name {name!r}: {module_name} fails on import: {error_text(problem)}") from problem


def _lacks(problem: ModuleNotFoundError, module_name: str) -> bool:
    """Whether it is this module that is missing, or a package of it."""
    missing = str(problem.name).rpartition("beside_shardproof.")[2]
    return module_name == missing or module_name.startswith(f"{missing}.")


def _elsewhere(module_name: str) -> ModuleType:
    """Import the module as the user's own statement `import` finds it: `shardproof.rooms` looks at the caller."""
    found: ModuleType = __import__(module_name, {}, {}, ("__name__",))
    return found
