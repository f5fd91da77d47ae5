"""The engines by their words on the command line; the class of one is imported when it is used."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardproof.harness.errors import RequestError

if TYPE_CHECKING:
    from shardproof.harness.engines.engine import Engine


def _inproc() -> "Engine":
    from shardproof.harness.engines.threads.inproc import InprocEngine  # noqa: PLC0415  (a run has one engine)

    return InprocEngine()


def _pool() -> "Engine":
    from shardproof.harness.engines.processes.forked.pool import PoolEngine  # noqa: PLC0415  (as above)

    return PoolEngine()


def _torchrun() -> "Engine":
    from shardproof.harness.engines.processes.launched.torchrun import TorchrunEngine  # noqa: PLC0415  (as above)

    return TorchrunEngine()


def _dry() -> "Engine":
    from shardproof.harness.engines.threads.dry import DryEngine  # noqa: PLC0415  (as above)

    return DryEngine()


ENGINES: "dict[str, Callable[[], Engine]]" = {"inproc": _inproc, "pool": _pool, "torchrun": _torchrun, "dry": _dry}
"""Word of the command line -> what makes the engine, and imports it then."""


def known_engine(name: str) -> "Callable[[], Engine]":
    """Constructor of the engine of this word. Raises RequestError for an unknown word."""
    if name not in ENGINES:
        raise RequestError(f"engine={name}: is not a known engine; legal: {' '.join(ENGINES)}")
    return ENGINES[name]


def engine_named(name: str) -> "Engine":
    """A fresh engine by its word on the command line; a context manager. Raises RequestError for an unknown word."""
    return known_engine(name)()
