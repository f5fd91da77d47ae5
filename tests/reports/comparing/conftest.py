"""The runs that are compared: a program, the same again, and its traffic changed in three ways."""

from pathlib import Path

import pytest

from tests.reports.toy_traffic import WAYS, stored


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("runs")
    return {way: stored(out, way) for way in (*WAYS, "again")}
