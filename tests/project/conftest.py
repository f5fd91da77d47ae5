"""Fixtures of several tests of the project."""

from pathlib import Path

import pytest

from tests.project.installed import built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    return built(tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel"))
