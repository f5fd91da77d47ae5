"""First statements of a process that one of ours starts, where other packages may have the names of our folders.

`python -m shardproof.child MODULE WORDS...` calls `main(WORDS)` of a module of ours; `python -m MODULE` might run
theirs. `Target` is a function for a process that multiprocessing spawns.
"""

import sys
from importlib import import_module
from typing import Any

from shardproof.rooms import lead


class Target:
    """A function of ours, by its names: unpickled in a fresh process, it has our folders found before others."""

    def __init__(self, module: str, function: str) -> None:
        """Raises ShadowedError where another package has the place of ours already."""
        lead()
        self._names = module, function

    def __reduce__(self) -> tuple[object, ...]:
        return Target, self._names

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        module, function = self._names
        return getattr(import_module(module), function)(*args)


if __name__ == "__main__":
    lead()
    sys.exit(import_module(sys.argv[1]).main(*sys.argv[2:]))
