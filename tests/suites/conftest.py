"""Sessions of pytest that the tests begin inside of their own."""

from collections.abc import Callable

import pytest

Session = Callable[..., pytest.RunResult]
SMALL = "mode=tp tp=2 layers=1 hidden=16 heads=2 vocab=24 seq=4 micro=1 steps=1"


@pytest.fixture
def bare(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session of its own, without options from the environment."""
    for name in ("GITHUB_STEP_SUMMARY", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    return lambda *words: pytester.runpytest_inprocess("-p", "no:cacheprovider", *words)


@pytest.fixture
def outside(bare: Session) -> Session:
    """A session that names the suites as modules, in a folder that is not ours."""
    return lambda *words: bare("--pyargs", *words)
