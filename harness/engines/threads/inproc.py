"""The in-process engine: every rank a thread of this process, one of them running at a time.

Unmodified code that uses torch.distributed runs as it would on W processes. Collectives may be in place, functional,
asynchronous and coalesced, of objects, point to point; groups, DeviceMesh, DTensor, FSDP2 and DDP work. Results and
errors do not depend on the machine's load; a rank that deviates from the others ends the run in milliseconds.

Ranks share the state of their process: the working folder, CUDA's current device and generators, what C code reads of
the environment. They share the state of modules (their globals, class attributes and singletons) that `per_rank` does
not name. A rank may block until another rank acts in another way than by a call (a store's wait, a lock, a queue). Then
it keeps its turn and runs into the time limit. Threads that a rank starts are in its world; of one rank's threads one
at a time is in a call.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardproof.harness.engines.engine import Engine, RunRequest
from shardproof.harness.engines.one_thread import one_thread
from shardproof.harness.engines.threads.heap import Heap
from shardproof.harness.engines.threads.intervention import Intervention
from shardproof.harness.engines.threads.matcher import Race
from shardproof.harness.engines.threads.rank_threads import Aborted, RankThread, RankThreads
from shardproof.harness.engines.threads.rank_world import Enter, installed
from shardproof.harness.engines.threads.scheduler import RankStatus, RunEnd
from shardproof.harness.engines.threads.state.rank_state import CallerStreams, PerRankState
from shardproof.harness.engines.threads.unmapped import Unmapped
from shardproof.harness.errors import (
    Desynchronised,
    NotComputed,
    Position,
    Raced,
    RankRaised,
    ShardproofError,
    TimeLimit,
    ranks_text,
)
from shardproof.harness.ledger import Observer
from shardproof.harness.torch_internals.compiler import leave_uncompiled, share_compiled
from shardproof.harness.torch_internals.modes import keep_device_guard
from shardproof.harness.torch_internals.world import leave_world

if TYPE_CHECKING:
    from shardproof.harness.engines.calls.desync import RootCause
    from shardproof.harness.engines.threads.postmortem import Raised
    from shardproof.harness.engines.threads.state.module_state import Namespace

_SETTLE_S = 0.02
"""How long the other ranks may go on after a failure, so that the report shows where they wait."""
_ALIKE_S = 1.0
"""The same where it matters whether all of them raise alike."""


class InprocEngine(Engine):
    """Runs programs on ranks that are threads.

    During a run torch uses one thread. Number of threads, random streams, default dtype, the state of the modules that
    `per_rank` names and torch.distributed are restored after it, also when it fails.
    """

    name = "inproc"
    remote = False
    takes_interventions = True
    drew = True
    """Whether ranks of the last run drew from a random stream of the process, or seeded one."""

    def __init__(self) -> None:
        keep_device_guard()
        share_compiled()
        self._threads = RankThreads()
        weakref.finalize(self, self._threads.end)
        self._streams = CallerStreams()
        self._heap = Heap()
        self._unmapped = Unmapped()

    def run_request(
        self, request: RunRequest, observer: Observer | None, intervention: Intervention | None = None
    ) -> list[Any]:
        """The results by rank under the intervention; see Engine.run."""
        self._require_open()
        parts = intervention or Intervention()
        self.unwaited = ()
        leave_uncompiled()
        places: Sequence[Namespace] = ()
        if request.per_rank:
            from shardproof.harness.engines.threads.state.module_state import namespaces_of  # noqa: PLC0415

            places = namespaces_of(request.per_rank)
        with one_thread(), installed() as enter, self._unmapped.recorded():
            state = PerRankState(request.world_size, request.seed, places, self._streams)
            threads = self._threads.take(request.world_size)
            run = _Run(request, threads, state, observer, parts)
            run.scheduler.alive = self.alive
            try:
                results = run.results(enter)
                self.unwaited = run.matcher.unwaited()
                return results
            finally:
                stayed = run.scheduler.stop()
                self._threads.give_back([thread for rank, thread in enumerate(threads) if rank not in stayed])
                self.drew = state.drew
                state.restore()
                self._heap.settle()

    def _release(self) -> None:
        self._threads.end()


class _Run:
    """A run: its scheduler, its matcher, and how it ends."""

    def __init__(
        self,
        request: RunRequest,
        threads: Sequence[RankThread],
        state: PerRankState,
        observer: Observer | None,
        parts: Intervention,
    ) -> None:
        self.request = request
        self.scheduler = parts.scheduler(threads, state, request.timeout_s)
        self.matcher = parts.matcher(request.world_size, self.scheduler, observer)
        self.raised: list[Raised] = []
        self.raised_first = False
        self.others_ran = False
        self.values: list[Any] = [None] * request.world_size

    def results(self, enter: Enter) -> list[Any]:
        """Run to the end. Raises RankRaised, NotComputed, Desynchronised, Raced or TimeLimit."""
        program, args = self.request.program, self.request.args

        def body(rank: int) -> None:
            try:
                enter(self.matcher, rank, self.request.world_size)
                self.values[rank] = program(rank, *args)
            except BaseException as error:
                self._ended(rank, error)
            finally:
                leave_world()

        end = self.scheduler.drive(body)
        unmet = any(group.collectives or group.messages for group in self.matcher.groups.values())
        if end is RunEnd.DONE and not unmet and not self.raised and self.matcher.failure is None:
            return self.values
        from shardproof.harness.engines.threads import postmortem  # noqa: PLC0415

        if end is RunEnd.HALTED:
            self.scheduler.settle(_ALIKE_S if self.raised and self._hint(self.others_ran) else _SETTLE_S)
        cause = self._cause(end)
        if cause is None:
            return self.values
        found = postmortem.positions(self.scheduler, self.matcher, self.raised)
        raise self._error(cause, found) from (self.raised[0].error if self.raised_first else None)

    def _ended(self, rank: int, error: BaseException) -> None:
        """A rank's program ended with an exception."""
        if self.scheduler.stopping:
            return
        if isinstance(error, SystemExit) and not error.code:
            return
        if isinstance(error, Aborted):
            error = RuntimeError("a call on a process group of an earlier run, which has ended")
        if not self.raised and self.matcher.failure is None:
            self.raised_first = True
            others = [status for other, status in enumerate(self.scheduler.statuses) if other != rank]
            self.others_ran = any(status is not RankStatus.NOT_STARTED for status in others)
        from shardproof.harness.engines.threads.postmortem import Raised  # noqa: PLC0415

        self.raised.append(Raised(rank, error))
        self.scheduler.halt()

    def _hint(self, shared: bool) -> str:
        """Words that may help; `shared`: another rank may have left behind what the first one raised about."""
        from shardproof.harness.engines.threads.postmortem import hint  # noqa: PLC0415

        return hint(self.raised[0].error, others_ran=shared, per_rank=self.request.per_rank)

    def _cause(self, end: RunEnd) -> "RootCause | None":
        from shardproof.harness.engines.calls.desync import RootCause, of_deadlock, of_mismatch, of_skipped  # noqa: PLC0415
        from shardproof.harness.engines.threads import postmortem  # noqa: PLC0415

        failure = self.matcher.failure
        if self.raised_first:
            return postmortem.of_raise(self.raised, self.request.world_size)
        if isinstance(failure, Race):
            return RootCause(failure.text, (failure.rank,))
        if failure is not None:
            return of_mismatch(failure)
        if end is RunEnd.TIME:
            return postmortem.of_time(self.scheduler, self.request.timeout_s)
        if end is RunEnd.STUCK and self.scheduler.guests:
            return postmortem.of_guests(self.scheduler)
        if end is RunEnd.STUCK:
            done = [status is RankStatus.DONE for status in self.scheduler.statuses]
            return of_deadlock(done, self.matcher.waiting)
        return of_skipped(list(self.matcher.groups.values()))

    def _error(self, cause: "RootCause", positions: Sequence[Position]) -> ShardproofError:
        """The error to raise, after the threads have ended."""
        from shardproof.harness.engines.threads import postmortem  # noqa: PLC0415

        abandoned = self.scheduler.stop()
        text = cause.text
        if abandoned:
            text += f"; rank {ranks_text(abandoned)} is in native code and could not be interrupted: thread abandoned"
        if self.raised_first and isinstance(first := self.raised[0].error, NotComputed):
            return NotComputed(first.cause, ranks=cause.ranks, positions=positions)
        if cause.kind == postmortem.UNSERVED:
            return NotComputed(text, ranks=cause.ranks, positions=positions)
        if self.raised_first:
            shared = self.others_ran and not postmortem.alike(self.raised, self.request.world_size)
            return RankRaised(text + self._hint(shared), ranks=cause.ranks, positions=positions)
        if isinstance(self.matcher.failure, Race):
            return Raced(text, ranks=cause.ranks, positions=positions)
        if cause.kind:
            return Desynchronised(text, kind=cause.kind, ranks=cause.ranks, positions=positions)
        return TimeLimit(text, ranks=cause.ranks, positions=positions, abandoned=abandoned)
