"""The pytest plugin: points the suites at a subject and says how deep they look.

    pytest --pyargs suites --subject my.module:subject --modes tp,tp-sp --worlds 2,3 --hypothesis-profile deep

It loads in every pytest session of its environment, so it adds options and nothing else; what the suites need is in
their conftest. Profiles are `suites.profiles`.
"""

from __future__ import annotations

import pytest

__all__: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Three options; everything else is a word of the case or an option of hypothesis."""
    group = parser.getgroup("shardproof")
    group.addoption("--subject", default="parallel.subject:subject", help="implementation under test, module:object")
    group.addoption("--modes", default="all", help="modes to prove, comma separated, or all that the subject claims")
    group.addoption("--worlds", default="2,3,4,6", help="world sizes to draw from, comma separated")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make our profiles known before hypothesis looks for the one that it was told."""
    if config.getoption("hypothesis_profile", None):
        from suites.profiles import register  # noqa: PLC0415  (imports hypothesis, which other sessions may not want)

        register()
