"""Parameters of tests that the profile `deep` alone runs: `--hypothesis-profile deep`."""

from typing import Any

import pytest


def deep(cost: str, *values: object) -> list[Any]:
    """The values of one parameter, each marked `deep` with what it costs."""
    return [pytest.param(value, marks=pytest.mark.deep(cost)) for value in values]
