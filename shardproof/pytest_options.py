"""The options of the pytest plugin: one table of them and of their twins in the ini file.

An option on the command line wins over the ini file (`shardproof_subject = my.module:subject`), and that over the
default.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

GROUP = "shardproof"
ENGINE_OPENED = pytest.StashKey[bool]()
"""Set in a session's config once its engine has been opened."""


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
        """The option's name behind -- on the command line."""
        return self.name.replace("_", "-")

    @property
    def dest(self) -> str:
        """Its name in the ini file and among pytest's parsed options, where a user may have a `--device` too."""
        return f"shardproof_{self.name}"

    @property
    def about(self) -> str:
        """Its help, with the default."""
        return f"{self.help} ({self.default})" if self.default else self.help


OPTIONS = (
    Option(name="subject", default="shardproof.parallel.subject:subject", help="the code to verify, module:object"),
    Option(name="truth", default="", help="a dense model to compare with, module:object, or alone: itself on one rank"),
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


def add_options(parser: pytest.Parser) -> None:
    """Add every option to the command line, unless they are there already."""
    group = parser.getgroup(GROUP)
    if group.options:
        return
    for option in OPTIONS:
        value: dict[str, Any] = {"action": "store_const", "const": "yes"} if option.flag else {"default": None}
        group.addoption(f"--{option.word}", dest=option.dest, help=option.about, **value)


def are_added(config: pytest.Config) -> bool:
    """Whether this session has our options."""
    return any(hasattr(config.option, option.dest) for option in OPTIONS)


def has_our_options(config: pytest.Config) -> bool:
    """Whether one of our options is on the command line."""
    return any(config.getoption(option.dest, None) for option in OPTIONS)


def option_value(config: pytest.Config, name: str) -> str:
    """The value of an option in this session; a flag is "yes" or "". Raises UsageError for a flag of the ini file that
    is neither true nor false.
    """
    option = next(option for option in OPTIONS if option.name == name)
    written = config.getoption(option.dest, None)
    if written or not option.twin:
        return str(written or option.default)
    try:
        found = config.getini(option.dest)
    except (ValueError, pytest.UsageError) as problem:
        raise pytest.UsageError(f"{option.dest}: {problem}; legal: true or false") from problem
    return ("yes" if found else "") if option.flag else str(found)


def option_path(config: pytest.Config, name: str) -> Path | None:
    """The path of an option, None when there is none. The command line's starts where pytest was called, the ini
    file's where that file lies.
    """
    text = option_value(config, name)
    if not text:
        return None
    option = next(option for option in OPTIONS if option.name == name)
    start = config.invocation_params.dir if config.getoption(option.dest, None) else config.rootpath
    return start / text
