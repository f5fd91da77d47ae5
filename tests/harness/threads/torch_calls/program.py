"""The program of a rank: every call of the list, whatever became of the one before."""

import warnings
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
from tests.harness.threads.torch_calls.listed import CALLS, plain

_KINDS = (TypeError, ValueError, RuntimeError, LookupError, AssertionError)


def on_rank(rank: int, size: int, names: Sequence[str]) -> dict[str, Any]:
    """Results of all calls, in plain Python; an exception as a set of the kinds that a program can catch it by."""
    found: dict[str, Any] = {}
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[name] = plain(CALLS[name](rank, size))
            except Exception as error:
                found[name] = frozenset(kind for kind in _KINDS if isinstance(error, kind))
    return found
