"""Interventions: other parts for the in-process engine, for one run: a scheduler, a collective matcher.

A fault, a drawn schedule and a stress of buffers are each a Scheduler or a CollectiveMatcher of its own kind. A run
without one uses the plain parts at no cost. `Intervened` is an engine in which every run has the same intervention.
"""

from collections.abc import Sequence
from typing import Any

from shardproof.harness.engines.engine import Engine, RunRequest
from shardproof.harness.engines.threads.matcher import CollectiveMatcher
from shardproof.harness.engines.threads.rank_threads import RankThread
from shardproof.harness.engines.threads.scheduler import Scheduler
from shardproof.harness.engines.threads.state.rank_state import PerRankState
from shardproof.harness.errors import RequestError
from shardproof.harness.ledger import Observer


class Intervention:
    """Makes the parts of one run: these as they are, and the base of those that change something."""

    def scheduler(self, threads: Sequence[RankThread], state: PerRankState, timeout_s: float) -> Scheduler:
        """First come, first served."""
        return Scheduler(threads, state, timeout_s)

    def matcher(self, world_size: int, scheduler: Scheduler, observer: Observer | None) -> CollectiveMatcher:
        """Calls are computed as issued."""
        return CollectiveMatcher(world_size, scheduler, observer)


class Intervened(Engine):
    """An in-process engine whose runs all have one intervention; closing it leaves the engine itself open.

    Raises RequestError for an engine that takes none.
    """

    def __init__(self, engine: Engine, intervention: Intervention) -> None:
        if not getattr(engine, "takes_interventions", False):
            raise RequestError(f"engine={engine.name}: takes no interventions; legal: inproc")
        self._engine: Any = engine
        self._intervention = intervention
        self.name, self.remote = engine.name, engine.remote

    def run_request(self, request: RunRequest, observer: Observer | None) -> list[Any]:
        """The results by rank under the intervention; see Engine.run."""
        self.unwaited = ()
        results: list[Any] = self._engine.run_request(request, observer, self._intervention)
        self.unwaited = self._engine.unwaited
        return results
