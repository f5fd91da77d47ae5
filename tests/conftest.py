"""Fixtures of all tests: the hypothesis profile, one torch thread, our packages for child processes, prover, pool."""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import settings

from bench.skips import has_run, report
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.reference.case import Case
from shardproof.suites.drawing.profiles import FEW, register
from shardproof.suites.session.prover import Prover
from tests import ROOT
from tests.harness.command_line import CommandLine, command_line

CHANGED = tuple(
    f"tests/harness/{folder}/"
    for folder in ("engines", "processes", "programs", "recording", "threads", "torch_internals")
)
"""Tests of what stands between a program and torch, which packages change: DeepSpeed and Megatron-Core patch it."""


@pytest.hookimpl(tryfirst=True)  # before hypothesis looks for the profile of its option
def pytest_configure(config: pytest.Config) -> None:
    """Let the suites draw few cases (FEW), unless a profile is named; let child processes import the tests."""
    register()
    config.option.hypothesis_profile = config.option.hypothesis_profile or FEW
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job behind `&`; children would ignore it too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.dont_write_bytecode = False  # workers, child processes and planted copies all import what was compiled once
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(ROOT), *filter(None, inherited)]))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Exclude everything that is loaded while tests are collected from garbage collection.

    Objects that tests make go with their last reference, so few collections are needed. The suites, which read their
    number of cases when they are imported, draw few; all other tests draw as many as in the profile `quick`.
    """
    gc.disable()
    gc.set_threshold(20_000, 10, 10)
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        if session.config.option.hypothesis_profile == FEW:
            settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--after REPORT`, by which the second run of CI leaves out what its first one ran."""
    parser.addoption("--after", metavar="REPORT", help="leave out what has run there")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first: a long one that begins last would keep a single worker busy while the others are idle.

    Tests that are marked `deep` are skipped in every other profile. Tests that another environment has run are left
    out, except those that packages can change.
    """
    if path := config.getoption("after", None):
        done = report(Path(path))
        left = [item for item in items if not item.nodeid.startswith(CHANGED) and has_run(item.nodeid, done)]
        config.hook.pytest_deselected(items=left)
        gone = {*left}
        items[:] = [item for item in items if item not in gone]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if config.getoption("hypothesis_profile", None) != "deep":
        for item in items:
            if mark := item.get_closest_marker("deep"):
                item.add_marker(pytest.mark.skip(reason=f"{mark.args[0]}: --hypothesis-profile deep"))


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    """Small matrices gain nothing from threads, and the machine is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def prover() -> Iterator[Prover]:
    """Proves cases of our own implementation, whatever subject the suites of this session are about."""
    with Prover.on("shardproof.parallel.subject:subject", "2,3,4,6") as prover:
        yield prover


@pytest.fixture(scope="session")
def loaded(prover: Prover) -> None:
    """Load what torch and pandas load when they first compute, for tests that begin a session inside this one.

    Such a session forgets what it has loaded itself, and torch does not work if it is loaded twice.
    """
    pd.DataFrame({"loaded": ["once"]})
    importlib.import_module("torch._dynamo")  # which torch loads with the first random number of some programs
    prover.proof(Case.parse("tp=2 layers=1 hidden=16 heads=2 seq=4 micro=1 steps=1 optimizer=adamw recompute=full"))


@pytest.fixture(scope="session")
def pool() -> Iterator[PoolEngine]:
    """Ranks as processes, for all tests of a session: the two servers of a pool take seven CPU seconds to start."""
    with PoolEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def engine() -> Iterator[InprocEngine]:
    """Ranks as threads of this process, for all tests of a module."""
    with InprocEngine() as made:
        yield made


@pytest.fixture(scope="module")
def dry() -> Iterator[DryEngine]:
    """Ranks on shapes alone, for all tests of a module."""
    with DryEngine() as made:
        yield made


@pytest.fixture
def shardproof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line, standing in the test's own folder."""
    return command_line(tmp_path, monkeypatch, capsys)


@pytest.fixture
def shardproof_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line with its real engine and no second process; it imports modules that lie in the test's folder.

    A module is imported once in a process, so those of two tests need different names.
    """
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return CommandLine(capsys)
