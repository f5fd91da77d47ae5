"""What every suite shares: the profile, the modes under proof, and the prover of the subject that was named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from suites.profiles import register
from suites.prover import Prover, chosen_modes


def pytest_configure(config: pytest.Config) -> None:
    """Load the profile `quick`, unless hypothesis was told another one."""
    register()
    settings.load_profile(config.getoption("hypothesis_profile", None) or "quick")


def pytest_report_header(config: pytest.Config) -> str:
    """One line: who is under test, where and how deep."""
    asked = config.option
    return f"shardproof: subject {asked.subject}, modes {asked.modes}, worlds {asked.worlds}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every suite that asks for a `mode` once for each mode under proof."""
    if "mode" in metafunc.fixturenames:
        asked = metafunc.config.option
        metafunc.parametrize("mode", chosen_modes(asked.subject, asked.modes))


@pytest.fixture(scope="session")
def prover(request: pytest.FixtureRequest) -> Iterator[Prover]:
    """Proves cases of the subject under test, on one engine for the whole session."""
    asked = request.config.option
    with Prover.on(asked.subject, asked.worlds) as prover:
        yield prover
