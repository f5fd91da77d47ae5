"""Interventions: other parts for the in-process engine, for one run: what ranks have to themselves, who hands
out the baton, where calls meet.

A fault, a drawn schedule and a stress of buffers are each a Baton or an Exchange of its own kind. A run without one
uses the plain parts and pays nothing. `Intervened` is an engine in which every run has the same intervention.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any, Protocol, Self

from harness.engines.engine import Engine, Program, Unwaited
from harness.engines.threads.matcher import Exchange
from harness.engines.threads.rank_state import Private
from harness.engines.threads.rank_threads import Worker
from harness.engines.threads.rng_streams import Caller
from harness.engines.threads.scheduler import Baton
from harness.errors import RequestError
from harness.ledger import Observer

__all__ = ["Intervened", "Intervention", "Plain"]


class Intervention(Protocol):
    """Makes the parts of one run."""

    def private(self, world_size: int, seed: int, modules: Sequence[ModuleType], caller: Caller) -> Private:
        """What each rank has to itself."""
        ...

    def baton(self, workers: Sequence[Worker], private: Private, timeout_s: float) -> Baton:
        """Who runs when."""
        ...

    def exchange(self, world_size: int, baton: Baton, observer: Observer | None) -> Exchange:
        """Where the calls of the ranks meet."""
        ...


class Plain:
    """The parts as they are: the intervention that changes nothing, and what others inherit the rest from."""

    def private(self, world_size: int, seed: int, modules: Sequence[ModuleType], caller: Caller) -> Private:
        """Random streams, default dtype and the globals of the listed modules."""
        return Private(world_size, seed, modules, caller)

    def baton(self, workers: Sequence[Worker], private: Private, timeout_s: float) -> Baton:
        """First come, first served."""
        return Baton(workers, private, timeout_s)

    def exchange(self, world_size: int, baton: Baton, observer: Observer | None) -> Exchange:
        """Calls do what they say."""
        return Exchange(world_size, baton, observer)


class Intervened:
    """An in-process engine whose runs all have one intervention; closing it leaves the engine itself open.

    Raises RequestError for an engine that takes none.
    """

    def __init__(self, engine: Engine, intervention: Intervention) -> None:
        if not getattr(engine, "takes_interventions", False):
            raise RequestError(f"engine={engine.name}: takes no interventions; legal: inproc")
        self._engine: Any = engine
        self._intervention = intervention

    @property
    def name(self) -> str:
        """The engine's."""
        return str(self._engine.name)

    @property
    def remote(self) -> bool:
        """The engine's."""
        return bool(self._engine.remote)

    @property
    def unwaited(self) -> tuple[Unwaited, ...]:
        """The engine's."""
        found: tuple[Unwaited, ...] = self._engine.unwaited
        return found

    def run(self, program: Program, *args: Any, **words: Any) -> list[Any]:
        """The results by rank under the intervention; see Engine.run."""
        results: list[Any] = self._engine.run(program, *args, intervention=self._intervention, **words)
        return results

    def close(self) -> None:
        """Nothing of its own."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
