"""One run of a subject on all ranks of an engine: recorded, or unrecorded with its activations captured.

Ranks that are threads of this process are observed here, by one recorder for all; `perform` is what an engine runs on
every rank that has its process for itself, with torch.distributed initialised: there it is observed in the rank, and
task and report can be pickled. The outcome is turned into blocks inside every rank, because a DTensor knows its place
only there. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.engines.engine import Engine, Unwaited
from harness.engines.rank_environment import rank_device
from harness.errors import RequestError, error_text
from harness.ledger import Event, Observer
from harness.outcome.blocks import Block, blocks, localize
from harness.protocols import CaseLike, Subject
from harness.recording.annotations import TOOL
from harness.recording.capturing.module_calls import Capture
from harness.recording.measures import Overlap, RankCallIndex, SavedActivations
from harness.recording.recorder import Recorder
from harness.resolve import resolve
from harness.running.ranks.output import rank_output
from harness.subject import Unanswered, answered, called, kept_per_rank, named_axes, offers, session
from harness.torch_internals.compiler import leave_unloaded
from harness.torch_internals.modes import deterministic_on

if TYPE_CHECKING:
    from harness.recording.ranges import Ranges
    from harness.recording.spans import RankSpan, Stopwatch

_SAME_CLOCK_S = 3600.0
"""A task that seems older, or of the future, comes from a machine with another clock: its times begin here."""
Localized = dict[str, tuple[Block, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """One run of a subject as every rank receives it. `subject` is "module:object", or a callable to be pickled.

    `text` is what the ledger's column `case` says. `record` makes the ledger; `watch` captures the activations that the
    subject can place and measures what autograd saves, with `overlap` also which calls are hidden. The ledger's times
    begin at `origin_s`, of time.perf_counter.
    """

    case: CaseLike
    subject: str | Subject
    device: str
    text: str = ""
    record: bool = False
    watch: bool = False
    overlap: bool = False
    origin_s: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What one run gave: outcomes and captured activations by rank, the ledger when recorded.

    `unwaited` are asynchronous calls that were never waited for, `problem` is why activations could not be placed,
    `saved_bytes` by rank is the most that autograd held for backward, () when not measured. `hidden` are the calls
    (rank, call index) during which their rank computed a product, None when not measured. `spans` are those of ranks
    of a pipeline that ran at the same time.
    """

    outcomes: tuple[Localized, ...]
    captured: tuple[Localized, ...] = ()
    events: tuple[Event, ...] = ()
    unwaited: tuple[Unwaited, ...] = ()
    seconds: float = 0.0
    problem: str = ""
    saved_bytes: tuple[int, ...] = ()
    hidden: frozenset[RankCallIndex] | None = None
    spans: tuple[RankSpan, ...] = ()

    @classmethod
    def joined(cls, ranks: Sequence[Execution]) -> Execution:
        """What all ranks gave, each of which has run for itself."""
        problem = next((one.problem for one in ranks if one.problem), "")
        measured = [one.hidden for one in ranks if one.hidden is not None]
        return cls(
            outcomes=tuple(outcome for one in ranks for outcome in one.outcomes),
            captured=() if problem else tuple(captured for one in ranks for captured in one.captured),
            events=tuple(event for one in ranks for event in one.events),
            problem=problem,
            saved_bytes=tuple(size for one in ranks for size in one.saved_bytes),
            hidden=frozenset[RankCallIndex]().union(*measured) if measured else None,
            spans=tuple(span for one in ranks for span in one.spans),
        )


def execute(
    case: CaseLike,
    subject: Subject,
    engine: Engine,
    *,
    text: str,
    record: bool = True,
    device: str = "cpu",
    timeout_s: float = 60.0,
    name: str = "",
) -> Execution:
    """Run the case once; `text` is what the ledger's column `case` says. A tool that listens gets nvtx ranges.

    `name`, module:object, is how ranks in other processes find the subject; without it the subject is pickled. Raises
    what the engine raises: ProgramError when the subject fails, MachineError when the machine does.
    """
    task = RankTask(case=case, subject=name or subject, device=device, text=text, record=record)
    return _executed(task, subject, engine, timeout_s)


def execute_captured(
    case: CaseLike,
    subject: Subject,
    engine: Engine,
    *,
    device: str = "cpu",
    timeout_s: float = 60.0,
    name: str = "",
    overlap: bool = False,
) -> Execution:
    """Run the case once, unrecorded; capture every module's output and its gradient, and measure what is saved.

    With `overlap` it is measured too which asynchronous calls are hidden.

    Captured tensors become outcomes where the subject says how a rank's part lies in the full one
    (`subject.activations`); nothing is captured from a subject that does not say.
    """
    task = RankTask(case=case, subject=name or subject, device=device, watch=True, overlap=overlap)
    return _executed(task, subject, engine, timeout_s)


def _executed(task: RankTask, subject: Subject, engine: Engine, timeout_s: float) -> Execution:
    start_s, case = time.perf_counter(), task.case
    run = partial(engine.run, world_size=case.world_size, seed=case.seed, timeout_s=timeout_s)
    if engine.remote:
        found = Execution.joined(run(perform, sendable(task)))
    else:
        device = torch.device(task.device)
        with ExitStack() as entered:
            watching = _Watching(task, subject, device, None, entered)
            # Where a subject goes, the next run does not start.
            with chdir("."), session(subject), deterministic_on(device):
                program, per_rank = (_on_rank, subject, case, device, watching), kept_per_rank(subject)
                outcomes = run(*program, observer=watching.observer, per_rank=per_rank)
        found = watching.found(range(case.world_size), outcomes)
    return replace(found, unwaited=tuple(engine.unwaited), seconds=time.perf_counter() - start_s)


def sendable(task: RankTask) -> RankTask:
    """The task itself. Raises RequestError when it cannot be sent to another process."""
    try:
        pickle.dumps(task)
    except Exception as problem:  # whatever a user's own pickling raises
        rule = f"cannot be sent to the processes of the ranks ({error_text(problem)})"
        name = getattr(task.subject, "__qualname__", type(task.subject).__qualname__)
        raise RequestError(f"subject {name}: {rule}; legal: name it module:object") from problem
    return task


def perform(rank: int, task: RankTask) -> Execution:
    """Run the subject on this rank, which has its process for itself, as the task says."""
    from harness.engines.interposer import observing  # noqa: PLC0415
    from harness.engines.threads.state.module_state import own_state  # noqa: PLC0415

    leave_unloaded()
    subject: Any = resolve(task.subject) if isinstance(task.subject, str) else task.subject
    device, past_s = rank_device(task.device, rank), time.perf_counter() - task.origin_s
    origin_s = task.origin_s if 0 <= past_s < _SAME_CLOCK_S else None
    with own_state(kept_per_rank(subject)), session(subject), deterministic_on(device), ExitStack() as entered:
        watching = _Watching(task, subject, device, origin_s, entered)
        with observing(watching.observer) if watching.observer else nullcontext(), watching.on_rank(rank):
            outcome = called(subject, task.case, device)
        entered.close()
        found = watching.found([rank], [localize(outcome)])
        recorder = watching.recorder
        return replace(found, spans=recorder.spans(rank, found.events)) if recorder else found


def _on_rank(rank: int, subject: Subject, case: CaseLike, device: torch.device, watching: _Watching) -> Localized:
    """The program of a rank that is a thread."""
    with rank_output():
        with watching.on_rank(rank):
            outcome = called(subject, case, device)
        return localize(outcome)


def _ranges() -> Ranges | None:
    """The ranges for a tool that listens to this process; None when none does."""
    if not os.environ.get(TOOL):
        return None
    from harness.recording.ranges import attached  # noqa: PLC0415

    return attached()


def _stopwatch(device: torch.device) -> Stopwatch | None:
    """The stopwatch of a device, None where the host's clock is true."""
    if device.type != "cuda":
        return None
    from harness.recording.spans import stopwatch  # noqa: PLC0415

    return stopwatch(device)


class _Watching:
    """What observes the ranks of this process, as a task says: all of it is made and entered here."""

    def __init__(
        self, task: RankTask, subject: Subject, device: torch.device, origin_s: float | None, entered: ExitStack
    ) -> None:
        self._case, self._subject = task.case, subject
        self._saved = SavedActivations() if task.watch else None
        self._hiding = entered.enter_context(Overlap()) if task.overlap else None
        places = task.watch and offers(subject, "activations")
        self._capture = entered.enter_context(Capture()) if places else None
        self.recorder: Recorder | None = None
        if task.record:
            case = task.case
            named = task.text, case.mode, case.world_size, named_axes(case, subject)
            recorder = Recorder(*named, ranges=_ranges(), origin_s=origin_s, stopwatch=_stopwatch(device))
            self.recorder = entered.enter_context(recorder)
        self.observer: Observer | None = self.recorder or self._hiding

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        """To be entered in the thread of a rank, around its program."""
        with ExitStack() as entered:
            for watcher in (self._capture, self._saved, self._hiding, self.recorder):
                if watcher is not None:
                    entered.enter_context(watcher.on_rank(rank))
            yield

    def found(self, ranks: Sequence[int], outcomes: Sequence[Localized]) -> Execution:
        """These outcomes, and what was seen of these ranks."""
        captured: list[Localized] = []
        problem = ""
        try:
            if capture := self._capture:
                captured = answered("activations", lambda: [self._placed(rank, capture) for rank in ranks])
        except Unanswered as error:  # the subject's own words on its layout: wrong words are told, the run stands
            problem = str(error)
        return Execution(
            outcomes=tuple(outcomes),
            captured=tuple(captured),
            events=tuple(self.recorder.events()) if self.recorder else (),
            problem=problem,
            saved_bytes=tuple(map(self._saved.peak_bytes, ranks)) if self._saved else (),
            hidden=frozenset(self._hiding.hidden) if self._hiding else None,
        )

    def _placed(self, rank: int, capture: Capture) -> Localized:
        """The captured tensors of one rank as blocks of full ones; modules without a counterpart are left out."""
        place = getattr(self._subject, "activations")  # noqa: B009  (optional, so the protocol does not declare it)

        def shards(kind: str, locals_: Mapping[str, Tensor]) -> Localized:
            found = {module: place(self._case, rank, module, local) for module, local in locals_.items()}
            return {f"{kind}/{module}": blocks(shard) for module, shard in found.items() if shard is not None}

        return shards("act", capture.outputs(rank)) | shards("act_grad", capture.gradients(rank))
