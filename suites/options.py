"""The plugin's options and their twins in the ini file: one table, from which both are made.

An option on the command line wins over the ini file (`shardproof_subject = my.module:subject`), and that over the
default. Nothing is imported here but pytest: the plugin loads in every session of its environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["OPTIONS", "Option", "asked", "path_asked", "register"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A word of the command line; a `flag` takes no value, and one without `twin` is not for the ini file."""

    name: str
    default: str
    help: str
    flag: bool = False
    twin: bool = True

    @property
    def word(self) -> str:
        """What follows -- on the command line."""
        return self.name.replace("_", "-")


OPTIONS = (
    Option(name="subject", default="parallel.subject:subject", help="implementation under test, module:object"),
    Option(name="modes", default="all", help="modes to prove, comma separated, or all that the subject claims"),
    Option(name="worlds", default="2,3,4,6", help="world sizes to draw from, comma separated"),
    Option(name="case", default="", help="prove this one case instead of drawing any, key=value words in quotes"),
    Option(name="engine", default="inproc", help="how ranks are run, as in shardproof run"),
    Option(name="device", default="cpu", help="where tensors live, cpu or cuda"),
    Option(name="faults", default="", help="disturb every collective of the subject: a test each", flag=True),
    Option(name="case_timeout", default="60", help="seconds that one run of a case may take"),
    Option(name="run_dir", default="", help="folder that gets a run folder of every case proved"),
    Option(name="known_failures", default="", help="TOML file of tests that may fail, with reasons; stale ones fail"),
    Option(name="ledger_baseline", default="", help="folder of ledgers that the default cases must have"),
    Option(name="update_ledgers", default="", help="write --ledger-baseline anew", flag=True, twin=False),
)


def register(parser: pytest.Parser) -> None:
    """Offer every option, on the command line and in the ini file."""
    group = parser.getgroup("shardproof")
    for option in OPTIONS:
        words = f"{option.help} ({option.default})" if option.default else option.help
        if option.flag:
            group.addoption(f"--{option.word}", dest=option.name, action="store_const", const="yes", help=words)
        else:
            group.addoption(f"--{option.word}", dest=option.name, default=None, help=words)
        if option.twin and option.flag:
            parser.addini(f"shardproof_{option.name}", words, type="bool", default=False)
        elif option.twin:
            parser.addini(f"shardproof_{option.name}", words, default=option.default)


def asked(config: pytest.Config, name: str) -> str:
    """What this session was told of an option; a flag is "yes" or ""."""
    option = next(option for option in OPTIONS if option.name == name)
    given = config.getoption(name, None)
    if given or not option.twin:
        return str(given or option.default)
    try:
        told = config.getini(f"shardproof_{name}")
    except (ValueError, pytest.UsageError) as problem:
        raise pytest.UsageError(f"shardproof_{name}: {problem}; legal: true or false") from problem
    return ("yes" if told else "") if option.flag else str(told)


def path_asked(config: pytest.Config, name: str) -> Path | None:
    """The path of an option, None when there is none. The command line's starts where pytest was called, the ini
    file's where that file lies.
    """
    text = asked(config, name)
    if not text:
        return None
    start = config.invocation_params.dir if config.getoption(name, None) else config.rootpath
    return start / text
