"""The program of a rank: every call of the list, whatever became of the one before."""

from collections.abc import Sequence
from typing import Any

from tests.harness.threads.torch_calls import (  # noqa: F401
    beyond_gloo,
    collectives,
    exchanges,
    groups,
    messages,
    mistakes,
    reductions,
)
from tests.harness.threads.torch_calls.listed import attempt


def on_rank(rank: int, size: int, names: Sequence[str]) -> dict[str, Any]:
    """See `listed.attempt`."""
    return attempt(rank, size, names)
