"""Stored runs that the tests of `reports` share: written by hand, or recorded of a program with changed traffic."""

from pathlib import Path

import pytest

from shardproof.reports.pages import page
from shardproof.reports.stored.frames import Run, load
from tests.reports import sample_run
from tests.reports.toy_traffic import WAYS, stored


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run written by hand, where every check passes."""
    return sample_run.write(tmp_path / "run")


@pytest.fixture
def run(folder: Path) -> Run:
    """The frames of this folder."""
    return load(folder)


@pytest.fixture(scope="session")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a check that fails. Its folder is read, and never changed."""
    return load(sample_run.write(tmp_path_factory.mktemp("failing") / "run", failing=True))


@pytest.fixture(scope="session")
def html(failing: Run) -> str:
    """The page of the run that fails."""
    return page.render_page(failing)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Way -> run folder of a recorded program: as it is, again as it is, and with its traffic changed in three ways."""
    out = tmp_path_factory.mktemp("runs")
    return {way: stored(out, way) for way in (*WAYS, "again")}
