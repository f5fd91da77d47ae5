"""The command: `shardproof ...` and `python -m shardproof ...`; its words are in `reports.commands.cli`."""

import gc
import sys
from collections.abc import Sequence
from importlib import import_module

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of these words (default: the process's own) and return its exit status."""
    try:
        main_of_commands = import_module("shardproof.reports.commands.cli").main
    except KeyboardInterrupt:
        print("\nshardproof: interrupted", file=sys.stderr)
        return _INTERRUPTED
    status: int = main_of_commands(arguments)
    if arguments is None and not _reports_leaks():
        gc.freeze()  # the process ends now: looking through all that is left for garbage takes half a second
    return status


def _reports_leaks() -> bool:
    """Whether types of nanobind are loaded, such as triton's: at exit they print that they leaked unless collected."""
    return any(type(kind).__module__ == "nanobind" for kind in object.__subclasses__())


if __name__ == "__main__":
    sys.exit(main())
