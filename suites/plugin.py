"""The pytest plugin: points the suites at a subject and says how deep they look.

    pytest --pyargs suites --subject my.module:subject --modes tp,tp-sp --worlds 2,3 --hypothesis-profile deep

Profiles: quick (10 cases a property and mode, the default), default (50), deep (1000). On CI they are derandomised.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:  # the plugin loads in every pytest session: torch is imported only where a suite runs
    from suites.prover import Prover

__all__: list[str] = []

PROFILES = {"quick": 10, "default": 50, "deep": 1000}
"""Hypothesis profile -> cases a property and mode."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Three options; everything else is a word of the case or an option of hypothesis."""
    group = parser.getgroup("shardproof")
    group.addoption("--subject", default="parallel.subject:subject", help="implementation under test, module:object")
    group.addoption("--modes", default="all", help="modes to prove, comma separated, or all that the subject claims")
    group.addoption("--worlds", default="2,3,4,6", help="world sizes to draw from, comma separated")


def pytest_configure(config: pytest.Config) -> None:
    """Register the profiles and load `quick`, unless hypothesis was told another one."""
    on_ci = bool(os.environ.get("CI"))
    # `explain` runs many more failing cases and cannot look into ranks.
    phases = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink)
    slow = (HealthCheck.too_slow, HealthCheck.data_too_large)
    for name, cases in PROFILES.items():
        settings.register_profile(
            name,
            max_examples=cases,
            deadline=None,
            print_blob=True,
            derandomize=on_ci,
            database=None if on_ci else settings.get_profile("default").database,
            phases=phases,
            suppress_health_check=slow,
        )
    settings.load_profile(config.getoption("hypothesis_profile", None) or "quick")


def pytest_report_header(config: pytest.Config) -> str:
    """One line: who is under test and how deep."""
    options = config.option
    examples = settings.default.max_examples if settings.default else 0
    return f"shardproof: subject {options.subject}, modes {options.modes}, worlds {options.worlds}, {examples} cases"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that asks for a `mode` once for each mode under proof."""
    if "mode" in metafunc.fixturenames:
        from suites.prover import chosen_modes  # noqa: PLC0415  (imports torch)

        options = metafunc.config.option
        metafunc.parametrize("mode", chosen_modes(options.subject, options.modes))


@pytest.fixture(scope="session")
def prover(request: pytest.FixtureRequest) -> Iterator[Prover]:
    """Proves cases of the subject under test, on one engine for the whole session."""
    from suites.prover import Prover  # noqa: PLC0415  (imports torch)

    options = request.config.option
    with Prover.on(options.subject, options.worlds) as prover:
        yield prover
