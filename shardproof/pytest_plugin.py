"""The pytest plugin: points the suites at a subject and sets how many cases they draw.

    pytest --pyargs shardproof.suites --subject my.module:subject --modes tp,tp-sp --hypothesis-profile deep
    torchrun --nproc-per-node 4 -m pytest --pyargs shardproof.suites --engine torchrun

Under torchrun every process runs this command: rank 0's session draws, checks and reports; the others collect nothing,
serve rank 0 and end with it.

The plugin is loaded in every pytest session of its environment. There it adds names to the ini file, and nothing more
unless the suites are named as modules: no option, no import. The imports of the suites are in their conftest, which
pytest may find as late as it collects. Options and their twins in the ini file are one table. An option on the command
line wins over the ini file (`shardproof_subject = my.module:subject`), and that over the default. Profiles are in
`suites.drawing.profiles`.
"""

import contextlib
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

GROUP = "shardproof"


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


def given(config: pytest.Config) -> bool:
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


SUITES = Path(__file__).parent / "suites"
ENGINE_OPENED = pytest.StashKey[bool]()
"""Set in a session's config once its engine has been opened."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Our words of the ini file; our options only where the suites are named, for others may have a `--device` too."""
    for option in OPTIONS:
        if option.twin and option.flag:
            parser.addini(option.dest, option.about, type="bool", default=False)
        elif option.twin:
            parser.addini(option.dest, option.about, default=option.default)
    config: Any = pluginmanager.get_plugin("pytestconfig")
    if _named(config):
        add_options(parser)


def _named(config: pytest.Config) -> bool:
    """Whether this session names the suites as modules."""
    known = config.known_args_namespace
    return bool(known.pyargs) and any(names_suites(word) for word in known.file_or_dir)


def names_suites(word: str) -> bool:
    """Whether an argument of `pytest --pyargs` is the package of the suites, or something in it."""
    return f"{word.partition('::')[0]}.".startswith("shardproof.suites.")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Under torchrun, serve rank 0's session instead of having one.

    Raises UsageError for options that such a session cannot have.
    """
    if not are_added(config):
        return None
    if option_value(config, "engine") != "torchrun":
        return None
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("engine=torchrun: rank 0's session is the only one that draws; legal: without -n")
    from shardproof.harness.engines.processes.launched.torchrun import serve, serves  # noqa: PLC0415  (torch: only if needed)
    from shardproof.harness.errors import ShardproofError  # noqa: PLC0415

    try:
        return serve() if serves() else None
    except ShardproofError as problem:
        raise pytest.UsageError(str(problem)) from problem


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the ranks go that this session was launched with and had no use for."""
    if not are_added(config) or config.stash.get(ENGINE_OPENED, False):
        return
    if option_value(config, "engine") == "torchrun":
        from shardproof.harness.engines.processes.launched.torchrun import dismiss, serves  # noqa: PLC0415
        from shardproof.harness.errors import ShardproofError  # noqa: PLC0415

        with contextlib.suppress(ShardproofError):  # no launcher: the session has reported that already
            if not serves():
                dismiss()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register our profiles before hypothesis looks for the one of its option; refuse a wrong request."""
    if not are_added(config):
        return
    if config.getoption("hypothesis_profile", None):
        import_module("shardproof.suites.drawing.profiles").register()
    if _found_late(config) or given(config):
        import_module("shardproof.suites.session.request").check(config)


def pytest_report_header(config: pytest.Config) -> str | None:
    """The session's line, where the conftest of the suites comes too late to print it."""
    if not _found_late(config):
        return None
    header: str = import_module("shardproof.suites.session.request").header(config)
    return header


def _found_late(config: pytest.Config) -> bool:
    """Whether pytest finds the conftest of the suites only while it collects, as where they are named by module."""
    late = config.pluginmanager.get_plugin(str(SUITES / "conftest.py")) is None
    return late and are_added(config) and _named(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto`: as many workers as find a core for every rank that computes at the same time.

    The ranks of the in-process engine take turns, so a worker needs one core and xdist's own answer holds (None). An
    engine whose ranks are processes needs as many cores for a worker as its largest world has ranks.
    """
    if not are_added(config) or option_value(config, "engine") in ("inproc", "dry"):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # A word that is no number is refused where world sizes are read, with its rule.
    largest = max((int(word) for word in option_value(config, "worlds").split(",") if word.isdecimal()), default=1)
    return max(1, cores // largest)
