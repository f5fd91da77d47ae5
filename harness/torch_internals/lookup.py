"""Names of torch looked up: a name that this torch lacks becomes one sentence when it is needed, and not before."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from shardproof.harness.errors import MachineError

TESTED = ((2, 11), (2, 15))
"""First and last release of torch that `make compat` was run with; all between them as well."""


def tested_span() -> str:
    """The tested releases in words: "2.11 to 2.15"."""
    first, last = (".".join(map(str, release)) for release in TESTED)
    return f"{first} to {last}"


def untested_note(version: str = torch.__version__) -> str:
    """A note if a version of torch ("2.13.0+cpu"; by default the one in use) was not tested, else ""."""
    digits = version.partition("+")[0].split(".")[:2]
    release = tuple(int(part) if part.isdecimal() else 0 for part in digits)
    if TESTED[0] <= release <= TESTED[1]:
        return ""
    return f"torch {version} was not tested: shardproof was tested with {tested_span()}, and anything may differ here"


def lacking_error(feature: str, name: str) -> MachineError:
    """The error of a feature that needs a name which this torch lacks."""
    return MachineError(
        f"{feature} is not available with torch {torch.__version__}, which has no {name}; legal: torch {tested_span()}"
    )


def find_name(owner: Any, name: str, feature: str) -> Any:
    """`owner.name`. If torch lacks the name, a function that raises the feature's MachineError when it is called."""
    value = getattr(owner, name, None)
    if value is not None:
        return value

    def refuse(*_arguments: object, **_words: object) -> NoReturn:
        raise lacking_error(feature, f"{getattr(owner, '__name__', owner)}.{name}")

    return refuse


def replace_function(original: object, stand_in: object, package: str) -> None:
    """Put another function in the place of this one in the modules of `package` that are imported.

    A module outside of it that imported the function before keeps the original.
    """
    for module in [module for name, module in sys.modules.items() if name.startswith(package)]:
        for key in [key for key, value in vars(module).items() if value is original]:
            setattr(module, key, stand_in)


@contextmanager
def replace_attribute(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Within it, the owner has another object under this name. An inherited name is inherited again afterwards."""
    own, original = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
