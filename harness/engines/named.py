"""The engines by their words on the command line; the class of one is imported when it is used."""

from __future__ import annotations

from typing import Any

from harness.engines.engine import Engine
from harness.errors import RequestError
from harness.resolve import resolve

ENGINES = {
    "inproc": "harness.engines.threads.inproc:InprocEngine",
    "pool": "harness.engines.processes.forked.pool:PoolEngine",
    "torchrun": "harness.engines.processes.launched.torchrun:TorchrunEngine",
    "dry": "harness.engines.shapes.dry:DryEngine",
}
"""Word of the command line -> the engine's class, resolved only when it is used."""


def known_engine(name: str) -> str:
    """Where the engine of this word is. Raises RequestError for an unknown word."""
    if name not in ENGINES:
        raise RequestError(f"engine={name}: is not a known engine; legal: {' '.join(ENGINES)}")
    return ENGINES[name]


def engine_named(name: str) -> Engine:
    """A fresh engine by its word on the command line; a context manager. Raises RequestError for an unknown word."""
    make: Any = resolve(known_engine(name))
    engine: Engine = make()
    return engine
