"""Ledgers: with --ledger-baseline, every default case of the subject sends what its stored ledger says."""

from pathlib import Path

import pytest

from shardproof.harness.protocols import CaseLike
from shardproof.harness.subject import case_of
from shardproof.pytest_options import option_path, option_value
from shardproof.reports.options.request import default_cases
from shardproof.suites.session.ledger_gate import LedgerGate, file_of
from shardproof.suites.session.request import subject_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize by the case of --case, else by each default case.

    Without --ledger-baseline there is none, and the fixture skips with that reason.
    """
    if "case" in metafunc.fixturenames:
        cases: tuple[CaseLike | None, ...] = (None,)
        if option_value(metafunc.config, "ledger_baseline"):
            subject, only = subject_of(metafunc.config), option_value(metafunc.config, "case")
            modes = option_value(metafunc.config, "modes")
            cases = (case_of(only, subject),) if only else default_cases(subject, modes)
        metafunc.parametrize("case", cases, ids=str)


def test_the_ledger_is_the_stored_one(ledger_gate: LedgerGate, case: CaseLike) -> None:
    ledger_gate.holds(case)


def test_no_stored_ledger_is_left_over(pytestconfig: pytest.Config) -> None:
    folder = option_path(pytestconfig, "ledger_baseline")
    if folder is None or option_value(pytestconfig, "modes") != "all" or option_value(pytestconfig, "case"):
        pytest.skip("needs --ledger-baseline and all default cases")
    files = {file_of(str(case)) for case in default_cases(subject_of(pytestconfig), "all")}
    left: list[Path] = [path for path in sorted(folder.glob("*.csv")) if path.name not in files]
    if option_value(pytestconfig, "update_ledgers"):
        for path in left:
            path.unlink()
        return
    assert not left, f"ledgers of no case: {', '.join(path.name for path in left)}; --update-ledgers removes them"
