"""The pytest plugin: points the suites at a subject and says how deep they look.

    pytest --pyargs suites --subject my.module:subject --modes tp,tp-sp --worlds 2,3 --hypothesis-profile deep
    torchrun --nproc-per-node 4 -m pytest --pyargs suites --engine torchrun

Under torchrun every process runs this command: rank 0's session draws, judges and reports; the others collect nothing,
serve rank 0 and end with it.

It loads in every pytest session of its environment, so it adds options, and does no more unless one is given or the
suites are named. What these need is in their conftest, which pytest may find as late as it collects. Options and their
ini twins are in `suites.options`, profiles in `suites.profiles`.
"""

from __future__ import annotations

import contextlib
import os

import pytest

from suites.options import OPTIONS, asked, register
from suites.scope import named_late

__all__ = ["ENGINE_OPENED"]

ENGINE_OPENED = pytest.StashKey[bool]()
"""Set in a session's config once its engine has been opened."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Our options; everything else is a word of the case or an option of hypothesis."""
    register(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Under torchrun, serve rank 0's session instead of having one."""
    if asked(config, "engine") != "torchrun":
        return None
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("engine=torchrun: rank 0's session is the only one that draws; legal: without -n")
    from harness.engines.processes.launched.torchrun import serve, serves  # noqa: PLC0415  (torch, which no other session wants yet)
    from harness.errors import ShardproofError  # noqa: PLC0415

    try:
        return serve() if serves() else None
    except ShardproofError as problem:
        raise pytest.UsageError(str(problem)) from problem


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the ranks go that this session was launched with and had no use for."""
    if asked(config, "engine") == "torchrun" and not config.stash.get(ENGINE_OPENED, False):
        from harness.engines.processes.launched.torchrun import dismiss, serves  # noqa: PLC0415
        from harness.errors import ShardproofError  # noqa: PLC0415

        with contextlib.suppress(ShardproofError):  # no launcher: the session has said so already
            if not serves():
                dismiss()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make our profiles known before hypothesis looks for the one that it was told; refuse a wrong request."""
    if config.getoption("hypothesis_profile", None):
        from suites.profiles import register as register_profiles  # noqa: PLC0415  (hypothesis, for those who want it)

        register_profiles()
    if named_late(config) or any(config.getoption(option.name, None) for option in OPTIONS):
        from suites.request import check  # noqa: PLC0415  (torch, as above)

        check(config)


def pytest_report_header(config: pytest.Config) -> str | None:
    """The session's line, where the conftest of the suites comes too late to tell it."""
    if not named_late(config):
        return None
    from suites.request import header  # noqa: PLC0415  (torch, as above)

    return header(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto`: as many workers as find a core for every rank that computes at the same time.

    The ranks of the in-process engine take turns, so a worker needs one core and xdist's own answer holds (None). An
    engine whose ranks are processes needs as many cores for a worker as its largest world has ranks.
    """
    if asked(config, "engine") in ("inproc", "dry"):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # A word that is no number is refused where world sizes are read, with its rule.
    largest = max((int(word) for word in asked(config, "worlds").split(",") if word.isdecimal()), default=1)
    return max(1, cores // largest)
