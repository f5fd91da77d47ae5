"""Which tests a session is about: those that can speak of its subject, and of the tools only where they are made.

Beside the suites lie tests of the tools themselves (`suites.meta`) and of our own implementation (marker `ours`).
Whoever points the suites at other code, or at one case, asks for neither.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.options import OPTIONS, option_value

__all__ = ["is_ours", "leaves_out"]

SUITES = Path(__file__).resolve().parent
META = SUITES / "meta"
_OURS = next(option.default for option in OPTIONS if option.name == "subject")


def is_ours(config: pytest.Config) -> bool:
    """Whether the subject under test is our own implementation."""
    return option_value(config, "subject") == _OURS


def leaves_out(path: Path, config: pytest.Config) -> bool:
    """Whether here are the tests of the tools, in a session that is about something else and does not name them."""
    if path.resolve() != META:
        return False
    elsewhere = config.rootpath.resolve() != SUITES.parent
    wanted = is_ours(config) and not option_value(config, "case") and not elsewhere
    return not wanted and not any(_names(config, word, META) for word in config.args)


def _names(config: pytest.Config, word: str, folder: Path) -> bool:
    """Whether an argument of pytest is this folder or something in it, as a module or as a path."""
    place = word.partition("::")[0]
    module = ".".join(folder.relative_to(SUITES.parent).parts)
    if config.getoption("pyargs", False) and f"{place}.".startswith(f"{module}."):
        return True
    path = (config.invocation_params.dir / place).resolve()
    return path == folder or folder in path.parents
