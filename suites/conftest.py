"""Fixtures of every suite: the profile, the modes under proof, the prover of the subject under test, and its gates."""

import os
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.errors import Unsatisfiable

from shardproof.harness.errors import RequestError
from shardproof.harness.running.request import seconds
from shardproof.harness.subject import case_of, claims
from shardproof.pytest_options import ENGINE_OPENED, add_options, option_path, option_value
from shardproof.suites.drawing.profiles import FEW, ONE_CASE, register
from shardproof.suites.killing import Collective, collectives
from shardproof.suites.session import known_failures
from shardproof.suites.session.ledger_gate import LedgerGate
from shardproof.suites.session.prover import Prover
from shardproof.suites.session.request import check, chosen_modes, header, subject_of

_MARKERS = (
    "inproc: runs what cannot be sent to other processes, so ranks must be threads of this one",
    "faults: disturbs the subject's collectives; deselected without --faults",
)
_COUNTED = ("passed", "failed", "error", "xfailed", "skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options. The plugin adds them only if the suites are named as modules."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Know our markers, and load the profile `quick`, unless another one was requested.

    Raises UsageError for a wrong request; CollectError if pytest finds this file only while it collects: pytest-xdist
    reports such an error once for all its workers.
    """
    _search_our_folder_last()
    for words in _MARKERS:
        config.addinivalue_line("markers", words)
    try:
        check(config)
    except pytest.UsageError as problem:
        if config.pluginmanager.has_plugin("session"):
            raise pytest.Collector.CollectError(str(problem)) from problem
        raise
    register()
    settings.load_profile(ONE_CASE if option_value(config, "case") else _profile(config))


def _search_our_folder_last() -> None:
    """Have Python search the user's folders first.

    pytest puts the folder above a package that it collects before all others. In a checkout that folder holds more than
    `shardproof`: `parallel` and `bench` may be names of the user's packages too.
    """
    ours = str(Path(__file__).parents[2])
    if sys.path[0] == ours:
        del sys.path[0]
    if ours not in sys.path:
        sys.path.append(ours)


def _profile(config: pytest.Config) -> str:
    return str(config.getoption("hypothesis_profile", None) or "quick")


def pytest_report_header(config: pytest.Config) -> str:
    """Header line: who is under test."""
    return header(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every suite with a parameter `mode` once for each mode under proof; with `collective`, once for each."""
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", _modes(metafunc.config))
    if "collective" in metafunc.fixturenames:
        metafunc.parametrize("collective", _collectives(metafunc.config), ids=str)


def _modes(config: pytest.Config) -> Sequence[str]:
    subject = subject_of(config)
    if text := option_value(config, "case"):
        return [case_of(text, subject).mode]
    return chosen_modes(subject, option_value(config, "modes"))


def _collectives(config: pytest.Config) -> list[Collective]:
    """Collectives that --faults disturbs; else an empty one for each mode, whose test is deselected or skipped."""
    modes = _modes(config)
    if not option_value(config, "faults") or option_value(config, "engine") != "inproc":
        return [Collective(mode=mode) for mode in modes]
    text = option_value(config, "case")
    quick = not text and _profile(config) in ("quick", FEW)
    try:
        timeout_s = seconds(option_value(config, "case_timeout"), "case-timeout")
        subject = subject_of(config)
        only = case_of(text, subject) if text else None
        return list(collectives(subject, modes, quick=quick, only=only, timeout_s=timeout_s))
    except RequestError as problem:
        raise pytest.Collector.CollectError(str(problem)) from problem


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark known failures, add a failing test for each stale entry, and skip what cannot be sent to other processes.

    The faults are deselected unless --faults is given.
    """
    if not option_value(config, "faults"):
        unasked = [item for item in items if item.get_closest_marker("faults")]
        items[:] = [item for item in items if item not in unasked]
        config.hook.pytest_deselected(items=unasked)
    if (engine := option_value(config, "engine")) != "inproc":
        reason = f"engine {engine}: planted code and closures are not sent to ranks"
        for item in items:
            if item.get_closest_marker("inproc"):
                item.add_marker(pytest.mark.skip(reason=reason))
    if path := option_path(config, "known_failures"):
        claimed = claims(subject_of(config)).modes
        known_failures.mark(session, items, known_failures.read_known_failures(path), claimed, _modes(config))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Skip a property for which the subject took no drawn case and no default case, with its reason."""
    _search_our_folder_last()
    try:
        return (yield)
    except Unsatisfiable:
        prover = pyfuncitem.funcargs.get("prover")
        if not isinstance(prover, Prover) or not prover.refusals:
            raise
        prover.skip_refused()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """On GitHub, write the step's page."""
    stats = terminalreporter.stats
    counts = {word: len(stats.get(word, ())) for word in _COUNTED}
    failures = [(report.nodeid, report.longreprtext) for word in ("failed", "error") for report in stats.get(word, ())]
    text = known_failures.summary_markdown(counts, failures, pytest_report_header(config))
    known_failures.append_summary(text, os.environ)


@pytest.fixture(scope="session")
def prover(request: pytest.FixtureRequest) -> Iterator[Prover]:
    """Proves cases of the subject under test, on one engine for the whole session."""
    config = request.config
    out = option_path(config, "run_dir")
    words = {name: option_value(config, name) for name in ("subject", "truth", "worlds", "device", "engine", "case")}
    config.stash[ENGINE_OPENED] = True
    timeout_s = seconds(option_value(config, "case_timeout"), "case-timeout")
    with Prover.on(**words, out=out, command=config.invocation_params.args, timeout_s=timeout_s) as prover:
        yield prover


@pytest.fixture(scope="session")
def ledger_gate(request: pytest.FixtureRequest, prover: Prover) -> LedgerGate:
    """Compares cases of the subject under test with the ledgers of --ledger-baseline."""
    folder = option_path(request.config, "ledger_baseline")
    if folder is None:
        pytest.skip("needs --ledger-baseline DIR")
    update = bool(option_value(request.config, "update_ledgers"))
    return LedgerGate(
        folder=folder, subject=prover.subject, engine=prover.engine, update=update, timeout_s=prover.timeout_s
    )
