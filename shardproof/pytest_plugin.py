"""The pytest plugin: points the suites at a subject and sets how many cases they draw.

    pytest --pyargs shardproof.suites --subject my.module:subject --modes tp,tp-sp --hypothesis-profile deep
    torchrun --nproc-per-node 4 -m pytest --pyargs shardproof.suites --engine torchrun

Under torchrun every process runs this command: rank 0's session draws, checks and reports; the others collect nothing,
serve rank 0 and end with it.

The plugin is loaded in every pytest session of its environment. There it adds names to the ini file, and nothing more
unless the suites are named as modules: no option, no import. The imports of the suites are in their conftest, which
pytest may find as late as it collects. Options are in `shardproof.pytest_options`, profiles in
`suites.drawing.profiles`.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from shardproof.pytest_options import ENGINE_OPENED, OPTIONS, add_options, are_added, has_our_options, option_value

SUITES = Path(__file__).parent / "suites"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Our words of the ini file; our options only where the suites are named, for others may have a `--device` too."""
    for option in OPTIONS:
        if option.twin and option.flag:
            parser.addini(option.dest, option.about, type="bool", default=False)
        elif option.twin:
            parser.addini(option.dest, option.about, default=option.default)
    config: Any = pluginmanager.get_plugin("pytestconfig")
    if _names_suites(config):
        add_options(parser)


def _names_suites(config: pytest.Config) -> bool:
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
    from shardproof.suites.session.launched import serve_first_rank  # noqa: PLC0415  (torch: only if needed)

    return serve_first_rank()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the ranks go that this session was launched with and had no use for."""
    if not are_added(config) or config.stash.get(ENGINE_OPENED, False):
        return
    if option_value(config, "engine") == "torchrun":
        from shardproof.suites.session.launched import dismiss_unused  # noqa: PLC0415  (as above)

        dismiss_unused()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register our profiles before hypothesis looks for the one of its option; refuse a wrong request."""
    if not are_added(config):
        return
    if config.getoption("hypothesis_profile", None):
        from shardproof.suites.drawing.profiles import register  # noqa: PLC0415  (only for those who name a profile)

        register()
    if _found_late(config) or has_our_options(config):
        from shardproof.suites.session.request import check  # noqa: PLC0415  (only where the suites are asked for)

        check(config)


def pytest_report_header(config: pytest.Config) -> str | None:
    """The session's line, where the conftest of the suites comes too late to print it."""
    if not _found_late(config):
        return None
    from shardproof.suites.session.request import header  # noqa: PLC0415  (as above)

    return header(config)


def _found_late(config: pytest.Config) -> bool:
    """Whether pytest finds the conftest of the suites only while it collects, as where they are named by module."""
    late = config.pluginmanager.get_plugin(str(SUITES / "conftest.py")) is None
    return late and are_added(config) and _names_suites(config)


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
