"""Runs a subject on all ranks of an engine: recorded with its activations captured, or plain.

Ranks that are threads of this process are observed here, by one recorder for all. On a rank that is a process, the
engine runs `perform`, which observes the rank there; its task and its answer are pickled. Every rank turns its outcome
into blocks itself, because a DTensor knows its place only there. Times are seconds, sizes bytes.
"""

import os
import pickle
import time
from collections.abc import Callable
from contextlib import ExitStack, chdir, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.interposer import observe_calls
from shardproof.harness.engines.rank_environment import rank_device
from shardproof.harness.engines.threads.rank_state import own_state
from shardproof.harness.errors import ProgramError, RequestError, error_text
from shardproof.harness.outcome.blocks import localize
from shardproof.harness.protocols import CaseLike, Subject
from shardproof.harness.recording.annotations import TOOL
from shardproof.harness.recording.capturing.module_calls import Capture
from shardproof.harness.recording.measures import Overlap, SavedActivations
from shardproof.harness.recording.ranges import attached_ranges
from shardproof.harness.recording.recorder import Recorder
from shardproof.harness.recording.spans import stopwatch
from shardproof.harness.resolve import resolve
from shardproof.harness.running.ranks.output import rank_output
from shardproof.harness.running.ranks.watching import Execution, Localized, Watching, locate_raise
from shardproof.harness.subject import call_subject, kept_per_rank, named_axes, offers, session
from shardproof.harness.torch_internals.compiler import leave_unloaded
from shardproof.harness.torch_internals.dispatch import deterministic_on

if TYPE_CHECKING:
    from shardproof.harness.recording.ranges import Ranges
    from shardproof.harness.recording.spans import Stopwatch

_SAME_CLOCK_S = 3600.0
"""A task that is older, or from the future, comes from a machine with another clock: its times begin as it arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """A run of a subject, as ranks in other processes receive it. `subject`: "module:object", or a callable to pickle.

    `text` is the ledger's column `case`. `record` makes the ledger. `watch` captures the activations that the subject
    can place, of the `observed` step and micro-batch, and measures what autograd saves. `overlap` measures which calls
    overlap with products. The ledger's times begin at `origin_s`, of time.perf_counter.
    """

    case: CaseLike
    subject: str | Subject
    device: str
    text: str = ""
    record: bool = False
    watch: bool = False
    overlap: bool = False
    observed: tuple[int, int] = (0, 0)
    origin_s: float = field(default_factory=time.perf_counter)

    @property
    def call(self) -> Any:
        """The subject, imported if it is given by name."""
        return resolve(self.subject) if isinstance(self.subject, str) else self.subject


def execute(
    case: CaseLike,
    subject: Subject,
    engine: Engine,
    *,
    text: str = "",
    record: bool = True,
    watch: bool = False,
    overlap: bool = False,
    observed: tuple[int, int] = (0, 0),
    device: str = "cpu",
    timeout_s: float = 60.0,
    name: str = "",
) -> Execution:
    """Run the case once, recorded or not; `text` is the ledger's column `case`.

    `watch` measures saved memory, and captures every module's output and its gradient in the `observed` step and
    micro-batch, if the subject states how a rank's part lies in the full one (`subject.activations`). `overlap`
    measures which asynchronous calls overlap with products. If a profiler listens, the run has nvtx ranges. `name`,
    module:object, is how ranks in other processes find the subject; without it the subject is pickled. Raises what the
    engine raises: ProgramError if the subject fails, MachineError if the machine does.
    """
    watched = partial(RankTask, record=record, watch=watch, overlap=overlap, observed=observed)
    task = watched(case=case, subject=name or subject, device=device, text=text)
    start_s = time.perf_counter()
    run = partial(engine.run, world_size=case.world_size, seed=case.seed, timeout_s=timeout_s)
    try:
        ranks = Execution.join_ranks(run(perform, sendable(task))) if engine.remote else _on_threads(task, subject, run)
    except ProgramError as error:
        locate_raise(error)
        raise
    return replace(ranks, unwaited=tuple(engine.unwaited), seconds=time.perf_counter() - start_s)


def _on_threads(task: RankTask, subject: Subject, run: Callable[..., Any]) -> Execution:
    case, device = task.case, torch.device(task.device)
    with ExitStack() as entered:
        watching = _enter_watching(task, subject, device, None, entered)
        # A subject may change the working directory; the next run starts in the old one.
        with chdir("."), session(subject), deterministic_on(device):
            program, per_rank = (_on_rank, subject, case, device, watching), kept_per_rank(subject)
            try:
                outcomes = run(*program, observer=watching.observer, per_rank=per_rank)
            except ProgramError as error:
                watching.locate(error)
                raise
    return watching.execution(range(case.world_size), outcomes)


def sendable(task: RankTask) -> RankTask:
    """The task itself. Raises RequestError if it cannot be pickled."""
    try:
        pickle.dumps(task)
    except Exception as problem:  # pickling a user's class may raise anything
        rule = f"cannot be sent to the processes of the ranks ({error_text(problem)})"
        name = getattr(task.subject, "__qualname__", type(task.subject).__qualname__)
        raise RequestError(f"subject {name}: {rule}; legal: name it module:object") from problem
    return task


def perform(rank: int, task: RankTask) -> Execution:
    """Run the subject as the task says, on this rank, which is a process."""
    leave_unloaded()
    subject = task.call
    device, past_s = rank_device(task.device, rank), time.perf_counter() - task.origin_s
    origin_s = task.origin_s if 0 <= past_s < _SAME_CLOCK_S else None
    with own_state(kept_per_rank(subject)), session(subject), deterministic_on(device), ExitStack() as entered:
        watching = _enter_watching(task, subject, device, origin_s, entered)
        with observe_calls(watching.observer) if watching.observer else nullcontext(), watching.on_rank(rank):
            outcome = call_subject(subject, task.case, device)
        entered.close()
        execution, recorder = watching.execution([rank], [localize(outcome)]), watching.recorder
        return replace(execution, spans=recorder.spans(rank, execution.events)) if recorder else execution


def _on_rank(rank: int, subject: Subject, case: CaseLike, device: torch.device, watching: Watching) -> Localized:
    """The program of a rank that is a thread."""
    with rank_output():
        with watching.on_rank(rank):
            outcome = call_subject(subject, case, device)
        return localize(outcome)


def _ranges() -> "Ranges | None":
    """The nvtx ranges, if a profiler listens to this process; else None."""
    if not os.environ.get(TOOL):
        return None
    return attached_ranges()


def _stopwatch(device: torch.device) -> "Stopwatch | None":
    """The stopwatch of a device; None if the host's clock is exact."""
    if device.type != "cuda":
        return None
    return stopwatch(device)


def _enter_watching(
    task: RankTask, subject: Subject, device: torch.device, origin_s: float | None, entered: ExitStack
) -> Watching:
    """Make and enter the observers that a task wants of the ranks of this process."""
    case, recorder = task.case, None
    saved = SavedActivations() if task.watch else None
    places = task.watch and offers(subject, "activations")
    capture = entered.enter_context(Capture(lambda *at: at == task.observed)) if places else None
    if task.record:
        named = task.text, case.mode, case.world_size, named_axes(case, subject)
        recorder = Recorder(*named, ranges=_ranges(), origin_s=origin_s, stopwatch=_stopwatch(device))
        entered.enter_context(recorder)
    hiding = entered.enter_context(Overlap(recorder)) if task.overlap else None
    return Watching(
        case=case,
        subject=subject,
        saved=saved,
        hiding=hiding,
        capture=capture,
        recorder=recorder,
        observer=hiding or recorder,
    )
