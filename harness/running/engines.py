"""The engines by their names on the command line. The class of an engine is imported when it is used."""

from importlib import import_module
from typing import TYPE_CHECKING

from shardproof.harness.errors import RequestError

if TYPE_CHECKING:
    from shardproof.harness.engines.engine import Engine

ENGINES = {
    "inproc": "shardproof.harness.engines.threads.inproc:InprocEngine",
    "pool": "shardproof.harness.engines.processes.forked.pool:PoolEngine",
    "torchrun": "shardproof.harness.engines.processes.launched.torchrun:TorchrunEngine",
    "dry": "shardproof.harness.engines.threads.dry:DryEngine",
}
"""Name on the command line -> the class of the engine."""


def check_engine(name: str) -> None:
    """Raise RequestError for an unknown name."""
    if name not in ENGINES:
        raise RequestError(f"engine={name}: is not a known engine; legal: {' '.join(ENGINES)}")


def engine_named(name: str) -> "Engine":
    """A new engine by its name on the command line, as a context manager. Raises RequestError for an unknown name."""
    check_engine(name)
    module, _, kind = ENGINES[name].partition(":")
    made: Engine = getattr(import_module(module), kind)()
    return made
