"""What every suite shares: the profile, the modes under proof, the prover of the subject under test, and its gates."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import settings

from harness.errors import RequestError
from reference.case import Case
from suites import known_failures, step_summary
from suites.ledger_gate import LedgerGate
from suites.necessity import Collective, collectives
from suites.options import asked, path_asked
from suites.plugin import ENGINE_OPENED
from suites.profiles import ONE_CASE, register
from suites.prover import Prover, chosen_modes

_COUNTED = ("passed", "failed", "error", "xfailed", "skipped")


def pytest_configure(config: pytest.Config) -> None:
    """Load the profile `quick`, unless hypothesis was told another one."""
    words = "inproc: runs what cannot be sent to other processes, so ranks must be threads of this one"
    config.addinivalue_line("markers", words)
    config.addinivalue_line("markers", "faults: disturbs the subject's collectives; deselected without --faults")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job behind `&`; children would ignore it too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    register()
    settings.load_profile(ONE_CASE if asked(config, "case") else _profile(config))


def _profile(config: pytest.Config) -> str:
    return str(config.getoption("hypothesis_profile", None) or "quick")


def pytest_report_header(config: pytest.Config) -> str:
    """One line: who is under test, where and how deep."""
    return "shardproof: " + ", ".join(
        f"{name} {asked(config, name)}" for name in ("subject", "modes", "worlds", "engine")
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every suite that asks for a `mode` once for each mode under proof; for a `collective`, once for each."""
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", _modes(metafunc.config))
    if "collective" in metafunc.fixturenames:
        metafunc.parametrize("collective", _collectives(metafunc.config), ids=str)


def _modes(config: pytest.Config) -> Sequence[str]:
    if text := asked(config, "case"):
        return [_the_case(text).mode]
    try:
        return chosen_modes(asked(config, "subject"), asked(config, "modes"))
    except RequestError as problem:
        raise pytest.Collector.CollectError(str(problem)) from problem


def _collectives(config: pytest.Config) -> list[Collective]:
    """What --faults disturbs; one a mode, to be deselected or skipped, where nothing is to be disturbed."""
    modes = _modes(config)
    if not asked(config, "faults") or asked(config, "engine") != "inproc":
        return [Collective(mode=mode) for mode in modes]
    if (device := asked(config, "device")) != "cpu":
        told = f"device={device}: faults are applied on the CPU; legal: --faults with --device cpu"
        raise pytest.Collector.CollectError(told)
    text = asked(config, "case")
    quick = not text and _profile(config) == "quick"
    try:
        only = _the_case(text) if text else None
        return list(collectives(asked(config, "subject"), modes, quick=quick, only=only))
    except RequestError as problem:
        raise pytest.Collector.CollectError(str(problem)) from problem


def _the_case(text: str) -> Case:
    try:
        return Case.parse(text)
    except ValueError as problem:
        raise pytest.Collector.CollectError(f"case {text!r}: {problem}") from problem


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let known failures fail, and stale ones too; skip what cannot be sent to ranks in other processes; leave out the
    faults that nobody asked for.
    """
    if not asked(config, "faults"):
        unasked = [item for item in items if item.get_closest_marker("faults")]
        items[:] = [item for item in items if item not in unasked]
        config.hook.pytest_deselected(items=unasked)
    if (engine := asked(config, "engine")) != "inproc":
        reason = f"engine {engine}: planted code and closures are not sent to ranks"
        for item in items:
            if item.get_closest_marker("inproc"):
                item.add_marker(pytest.mark.skip(reason=reason))
    if path := path_asked(config, "known_failures"):
        try:
            known_failures.mark(session, items, known_failures.read(path))
        except RequestError as problem:
            raise pytest.UsageError(str(problem)) from problem


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """On GitHub, tell the step's page."""
    stats = terminalreporter.stats
    counts = {word: len(stats.get(word, ())) for word in _COUNTED}
    failures = [(report.nodeid, report.longreprtext) for word in ("failed", "error") for report in stats.get(word, ())]
    step_summary.append(step_summary.told(counts, failures, pytest_report_header(config)), os.environ)


@pytest.fixture(scope="session")
def prover(request: pytest.FixtureRequest) -> Iterator[Prover]:
    """Proves cases of the subject under test, on one engine for the whole session."""
    config = request.config
    out = path_asked(config, "run_dir")
    words = {name: asked(config, name) for name in ("subject", "worlds", "device", "engine", "case")}
    config.stash[ENGINE_OPENED] = True
    with Prover.on(**words, out=out, command=config.invocation_params.args) as prover:
        yield prover


@pytest.fixture(scope="session")
def ledger_gate(request: pytest.FixtureRequest, prover: Prover) -> LedgerGate:
    """Holds cases of the subject under test against the ledgers of --ledger-baseline."""
    folder = path_asked(request.config, "ledger_baseline")
    if folder is None:
        pytest.skip("needs --ledger-baseline DIR")
    update = bool(asked(request.config, "update_ledgers"))
    return LedgerGate(folder=folder, subject=prover.subject, engine=prover.engine, update=update)
