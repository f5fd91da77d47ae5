"""The in-process engine: every rank a thread of this process, one of them running at a time.

Unmodified code that uses torch.distributed runs as it would on W processes. Collectives may be in place, functional,
asynchronous and coalesced, of objects, point to point; groups, DeviceMesh, DTensor, FSDP2 and DDP work. Results and
errors do not depend on the machine's load; a rank that deviates from the others ends the run in milliseconds.

Ranks share the state of their process: the working folder, CUDA's current device and generators, what C code reads of
the environment. They share the state of modules (their globals, class attributes and singletons) that `per_rank` does
not name. A rank that waits for another rank without a call (by a store's wait, a lock or a queue) keeps its turn and
runs into the time limit. Threads that a rank starts are in its world; of one rank's threads one at a time is in a call.

The engine's groups answer the methods that torch calls today. A method that a newer torch adds, or an operator of a
library, comes to the dispatcher instead (`Unmapped`). There it is reported to the observer as op `other` and passed on
to its own kernel, where it has one. Without one the call raises NotComputed, which names it, and the case is unknown.

A fault, a drawn schedule and a stress of buffers are each an `Intervention`: a Scheduler or a CollectiveMatcher of its
own kind. A run without one uses the plain parts at no cost.

Why a run ended badly, and where every rank stands, is read after the driver has the turn back and before the threads
are ended, so every frame is still there.
"""

import re
import sys
import sysconfig
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shardproof.harness.engines.calls.callers import caller_of, is_user, issued_at, place_raised, what_led_to
from shardproof.harness.engines.calls.operators import OPERATORS, communicates, make_reader
from shardproof.harness.engines.calls.pending import RootCause, of_deadlock, of_mismatch, of_skipped, position_in_call
from shardproof.harness.engines.engine import Engine, RunRequest
from shardproof.harness.engines.rank_environment import one_thread
from shardproof.harness.engines.starvation import LONGEST, LOOKING_S
from shardproof.harness.engines.threads.matcher import CollectiveMatcher, Race
from shardproof.harness.engines.threads.rank_state import CallerStreams, Namespace, PerRankState, namespaces_of
from shardproof.harness.engines.threads.rank_threads import Aborted, Heap, RankThread, RankThreads, Stillness
from shardproof.harness.engines.threads.rank_world import Enter, install_worlds
from shardproof.harness.engines.threads.scheduler import RankStatus, RunEnd, Scheduler
from shardproof.harness.errors import (
    Desynchronised,
    NotComputed,
    Position,
    Raced,
    RankRaised,
    RequestError,
    ShardproofError,
    TimeLimit,
    error_text,
    ranks_text,
)
from shardproof.harness.interpreter import turns_of_threads
from shardproof.harness.ledger import Observer
from shardproof.harness.torch_internals.compiler import leave_uncompiled, share_compiled
from shardproof.harness.torch_internals.dispatch import (
    BACKEND_SELECT,
    c10d_operators,
    has_kernel,
    keep_device_guard,
    kernels,
)
from shardproof.harness.torch_internals.sharding import Decisions
from shardproof.harness.torch_internals.world import leave_world, rank_tables

_BLOCKED = (
    "; where ranks are threads of one process, a lock or a queue that waits for another rank may wait for ever; "
    "legal: --engine pool"
)
UNSERVED = "unserved"
"""The kind of a root cause that is no fault of the program: the engine cannot run it."""
_LOOKS = 30
"""Looks at a running rank: more than a Stillness needs to report a blocked thread."""


class Raised(NamedTuple):
    """An exception that ended a rank's program."""

    rank: int
    error: BaseException


def rank_positions(scheduler: Scheduler, matcher: CollectiveMatcher, raised: Sequence[Raised]) -> list[Position]:
    """Where every rank stands, by rank."""
    errors = {entry.rank: entry.error for entry in raised}
    places = []
    for rank, (status, frame) in enumerate(zip(scheduler.statuses, scheduler.frames(), strict=True)):
        work = matcher.waiting[rank]
        if rank in errors:
            caller = place_raised(errors[rank].__traceback__)
            places.append(Position(rank=rank, state="raised", detail=error_text(errors[rank]), caller=caller))
        elif status in {RankStatus.DONE, RankStatus.NOT_STARTED}:
            places.append(Position(rank=rank, state="finished" if status is RankStatus.DONE else "not started"))
        elif work is not None and not work.event.done:
            places.append(position_in_call(work, "waits in", str(issued_at(frame) or "")))
        else:
            places.append(Position(rank=rank, state="runs", caller=caller_of(frame)))
    return places


def of_raise(raised: Sequence[Raised], world_size: int) -> RootCause:
    """The root cause if a rank raised first."""
    first = raised[0]
    place = place_raised(first.error.__traceback__)
    text = f"rank {first.rank} of {world_size} raised {error_text(first.error)}" + (f", at {place}" if place else "")
    text += what_led_to(first.error)
    return RootCause(text, tuple(entry.rank for entry in raised))


def raised_alike(raised: Sequence[Raised], world_size: int) -> bool:
    """Whether all ranks raised the same exception at one line: then no state that a rank left behind caused it."""
    places = {(type(entry.error), place_raised(entry.error.__traceback__)) for entry in raised}
    return len(raised) == world_size and len(places) == 1


def of_time(scheduler: Scheduler, timeout_s: float) -> RootCause:
    """The root cause if the time limit was reached while a rank was running, or while the turn changed."""
    frames = scheduler.frames()
    running = [rank for rank, status in enumerate(scheduler.statuses) if status is RankStatus.RUNNING]
    looks = {rank: Stillness(scheduler.idents[rank], strictly=True) for rank in running}
    blocked: set[int] = set()
    with turns_of_threads(LOOKING_S):
        for _ in range(_LOOKS):
            blocked = {rank for rank, look in looks.items() if look()}
            time.sleep(0.001)
    texts = []
    for rank in running:
        place, does = caller_of(frames[rank]), "is blocked" if rank in blocked else "runs"
        texts.append(f"rank {rank} {does}" + (f" at {place}" if place else ""))
    text = f"no end within {timeout_s:g} s: {', '.join(texts) or 'no rank was between two calls'}"
    if busy := scheduler.starvation.words:  # a thread that looks blocked may only wait for its turn
        return RootCause(f"{text}; {busy}; legal: --timeout {LONGEST * timeout_s:g}", tuple(running))
    return RootCause(text + (_BLOCKED if blocked else ""), tuple(running))


def of_guests(scheduler: Scheduler) -> RootCause:
    """The root cause if no rank can go on, and threads that ranks started wait to make calls for them."""
    texts = [f"rank {rank} calls {why}" for rank, why in sorted(scheduler.guests.items())]
    rule = "while its own thread waits in another call, and the threads of a rank call one at a time here"
    return RootCause(f"{', '.join(texts)} {rule}; legal: --engine pool", tuple(sorted(scheduler.guests)), UNSERVED)


_ALREADY = re.compile(r"already|\btwice\b|more than once|only once", re.IGNORECASE)
"""Words of exceptions about unexpected state, which another rank may have left behind."""
_NO_CUDA = re.compile(r"not compiled with CUDA|No CUDA GPUs|NVIDIA driver|CUDA support|a CUDA build|'_cuda_\w+'")
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))


def hint_at(error: BaseException, *, others_ran: bool, per_rank: Sequence[str]) -> str:
    """A clause for the message of an exception that a rank raised; "" if nothing is known.

    `others_ran`: other ranks had run before, and may have left state behind. `per_rank`: modules whose state each rank
    has for itself.
    """
    text = error_text(error)
    if _NO_CUDA.search(text):
        return "; on a machine without CUDA, legal: subject.session = shardproof.cuda_on_cpu"
    module, file = _raised_in(error)
    if not others_ran or not (_ALREADY.search(text) or file.startswith(_INSTALLED)):
        return ""
    legal = "" if module in per_rank else f"; legal: subject.per_rank = {(*per_rank, module)!r}"
    return f"; if --engine pool passes, ranks share state here because they are threads{legal}"


def _raised_in(error: BaseException) -> tuple[str, str]:
    """The module and the file of the innermost line outside torch."""
    module, file, traceback = "", "", error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if is_user(name):
            module, file = str(traceback.tb_frame.f_globals.get("__name__", "")), name
        traceback = traceback.tb_next
    return module, file


_KEY = "BackendSelect"


class Unmapped:
    """The operators of c10d that OPERATORS lacks. The search takes 3 ms, so it is made again only after imports."""

    def __init__(self) -> None:
        self._modules = 0
        self._operators: dict[str, Any] = {}

    @contextmanager
    def record_calls(self) -> Iterator[None]:
        """Within it, calls of these operators by rank threads are recorded."""
        if self._modules != len(sys.modules):
            names = [name for name in c10d_operators() if name not in OPERATORS]
            operators = {name: getattr(getattr(torch.ops.c10d, name), "default", None) for name in names}
            self._modules = len(sys.modules)
            self._operators = {name: one for name, one in operators.items() if one is not None and communicates(one)}
        if not self._operators:
            yield
            return
        with kernels("c10d", _KEY) as add:
            for name, operator in self._operators.items():
                if not has_kernel(f"c10d::{name}", _KEY):  # recorders of real backends have one
                    add(name, _kernel_of(name, operator), with_keyset=True)
            yield


def _kernel_of(name: str, operator: Any) -> Callable[..., Any]:
    """The kernel of this operator of c10d, under a key by which the dispatcher selects a backend."""
    read = make_reader(name, operator)

    def kernel(keys: Any, *arguments: Any) -> Any:
        rank = rank_tables()
        observer = None if rank is None else rank.matcher.observer
        issued = None if observer is None else read(arguments)
        ticket = None if observer is None or issued is None else observer.on_issue(issued.rank, issued.call)
        try:
            result = operator.redispatch(keys.remove(BACKEND_SELECT), *arguments)
        except RuntimeError as problem:
            if rank is None:
                raise
            text = f"c10d::{name} of torch {torch.__version__} is not known to the in-process engine, which cannot"
            text += f" compute it ({error_text(problem)}); legal: --engine pool"
            raise NotComputed(text, ranks=(rank.rank,)) from problem
        if observer is not None and issued is not None and ticket is not None:
            observer.on_completion(issued.rank, ticket)
        return result

    return kernel


class Intervention:
    """Makes the parts of one run: the plain ones. A subclass replaces some of them."""

    def places(self, names: Sequence[str]) -> tuple[Namespace, ...]:
        """Where every rank has state of its own: the modules of these names."""
        return namespaces_of(names)

    def hint(self, error: BaseException, *, others_ran: bool, per_rank: Sequence[str]) -> str:
        """A clause on an exception that a rank raised (see `hint_at`)."""
        return hint_at(error, others_ran=others_ran, per_rank=per_rank)

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


_SETTLE_S = 0.02
"""How long the other ranks may go on after a failure, so that the report shows where they wait."""
_ALIKE_S = 1.0
"""The same if it matters whether all of them raise alike."""


class InprocEngine(Engine):
    """Runs programs on ranks that are threads.

    During a run torch uses one thread. Number of threads, random streams, default dtype, the state of the modules that
    `per_rank` names and torch.distributed are restored after it, also if it fails.
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
        self._decisions = Decisions()

    def run_request(
        self, request: RunRequest, observer: Observer | None, intervention: Intervention | None = None
    ) -> list[Any]:
        """The results by rank under the intervention; see Engine.run."""
        self._require_open()
        parts = intervention or Intervention()
        self.unwaited = ()
        leave_uncompiled()
        places = parts.places(request.per_rank)
        with one_thread(), install_worlds() as enter, self._unmapped.record_calls(), self._decisions.share_decisions():
            state = PerRankState(request.world_size, request.seed, places, self._streams)
            threads = self._threads.take(request.world_size)
            run = _Run(request, threads, state, observer, parts)
            run.scheduler.alive = self.alive
            try:
                results = run.results(enter)
                self.unwaited = run.matcher.find_unwaited()
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
        self.request, self._parts = request, parts
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
                self._on_rank_error(rank, error)
            finally:
                leave_world()

        end = self.scheduler.drive(body)
        unmet = any(group.collectives or group.messages for group in self.matcher.groups.values())
        if end is RunEnd.DONE and not unmet and not self.raised and self.matcher.failure is None:
            return self.values
        if end is RunEnd.HALTED:
            self.scheduler.settle(_ALIKE_S if self.raised and self._hint(self.others_ran) else _SETTLE_S)
        cause = self._cause(end)
        if cause is None:
            return self.values
        found = rank_positions(self.scheduler, self.matcher, self.raised)
        raise self._error(cause, found) from (self.raised[0].error if self.raised_first else None)

    def _on_rank_error(self, rank: int, error: BaseException) -> None:
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
        self.raised.append(Raised(rank, error))
        self.scheduler.halt()

    def _hint(self, shared: bool) -> str:
        """A clause that may help. `shared`: another rank may have left the state of which the exception complains."""
        return self._parts.hint(self.raised[0].error, others_ran=shared, per_rank=self.request.per_rank)

    def _cause(self, end: RunEnd) -> RootCause | None:
        failure = self.matcher.failure
        if self.raised_first:
            return of_raise(self.raised, self.request.world_size)
        if isinstance(failure, Race):
            return RootCause(failure.text, (failure.rank,))
        if failure is not None:
            return of_mismatch(failure)
        if end is RunEnd.TIME:
            return of_time(self.scheduler, self.request.timeout_s)
        if end is RunEnd.STUCK and self.scheduler.guests:
            return of_guests(self.scheduler)
        if end is RunEnd.STUCK:
            done = [status is RankStatus.DONE for status in self.scheduler.statuses]
            return of_deadlock(done, self.matcher.waiting)
        return of_skipped(list(self.matcher.groups.values()))

    def _error(self, cause: RootCause, positions: Sequence[Position]) -> ShardproofError:
        """The error to raise, after the threads have ended."""
        abandoned = self.scheduler.stop()
        text = cause.text
        if abandoned:
            text += f"; rank {ranks_text(abandoned)} is in native code and could not be interrupted: thread abandoned"
        if self.raised_first and isinstance(first := self.raised[0].error, NotComputed):
            return NotComputed(first.cause, ranks=cause.ranks, positions=positions)
        if cause.kind == UNSERVED:
            return NotComputed(text, ranks=cause.ranks, positions=positions)
        if self.raised_first:
            shared = self.others_ran and not raised_alike(self.raised, self.request.world_size)
            return RankRaised(text + self._hint(shared), ranks=cause.ranks, positions=positions)
        if isinstance(self.matcher.failure, Race):
            return Raced(text, ranks=cause.ranks, positions=positions)
        if cause.kind:
            return Desynchronised(text, kind=cause.kind, ranks=cause.ranks, positions=positions)
        return TimeLimit(text, ranks=cause.ranks, positions=positions, abandoned=abandoned)
