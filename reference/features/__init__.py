"""The features of a case, found by name: every file of this folder is one, and no list names them. No torch.

A file has one class, which extends `Core`. The class has its words, each with default, meaning and legal values
(`reference.language.words.word`), and `problems`. Methods that change facts of a case (`layout`, `axes`, `data_axis`,
...) begin with `super()`. An implementation of a feature has the same name in `parallel` (`parallel.subject`). Names of
modules are put together by `module_in` and nowhere else.
"""

import pkgutil
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from shardproof.reference.language.core import Core
from shardproof.reference.language.words import Field, declared_words, word

_UNUSED = {"ep": 30}
"""Axes that an order of Megatron-Core may name, with their places. An axis without a feature has one rank."""


def module_in(package: str, name: str, import_module: Callable[[str], Any] = import_module) -> Any:
    """Import the module of this name in a package.

    Code that may be a copy with a planted bug passes its own import function, which finds modules of the copy.
    """
    return import_module(f"{package}.{name}")


def _find_features() -> dict[str, type[Core]]:
    modules = (module_in(__name__, file.name) for file in pkgutil.iter_modules(__path__))
    return {
        module.__name__.rpartition(".")[2]: cls
        for module in modules
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, Core) and cls.__module__ == module.__name__
    }


def _words(owners: Iterable[type[Core]]) -> dict[str, Field]:
    """The words of all of these, each after the one that it names, or that is declared before it."""
    names, fields = list[str](), dict[str, Field]()
    for owner in owners:
        before = ""
        for name, field in declared_words(owner).items():
            before = field.metadata["after"] or before
            names.insert(names.index(before) + 1 if before else len(names), name)
            fields[name], before = field, name
    return {name: fields[name] for name in names}


def _order(words: dict[str, Field], names: tuple[str, ...]) -> Field:
    """The word `order`: by default these axes, the fastest first; its other value exchanges tp and dp."""
    about = words["order"].metadata
    swapped = {"tp": "dp", "dp": "tp"}
    other = [swapped.get(name, name) for name in names if name not in _UNUSED]
    made: Any = word(
        "-".join(names),
        about["meaning"],
        legal=f"{' '.join(names)}{about['legal']}",
        domain=("-".join(names), "-".join(other)),
    )
    field: Field = made
    return field


def _axes(words: dict[str, Field]) -> tuple[str, ...]:
    places = {**_UNUSED, **{name: field.metadata["axis"] for name, field in words.items() if field.metadata["axis"]}}
    return tuple(sorted(places, key=lambda name: places[name]))


FEATURES: dict[str, type[Core]] = _find_features()
"""Name -> what the feature adds to a case."""
PARTS: dict[str, str] = {
    name: key
    for name, owner in FEATURES.items()
    for key, field in declared_words(owner).items()
    if field.metadata["part"]
}
"""A feature that only some models have -> the word that gives a model this feature."""
_DECLARED = _words((Core, *FEATURES.values()))
ORDER_NAMES = _axes(_DECLARED)
"""Every axis that the word `order` may name, the fastest of the default order first."""
WORDS: dict[str, Field] = {**_DECLARED, "order": _order(_DECLARED, ORDER_NAMES)}
"""Every word of the case language, in the order in which a case is printed."""
