"""One run of a subject on all ranks of an engine: recorded, or unrecorded with its activations captured.

The outcome is turned into blocks inside every rank, because a DTensor knows its place only there. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, chdir, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from harness.engines.engine import Engine, Unwaited
from harness.ledger import Event, Observer
from harness.outcome.blocks import localize
from harness.protocols import CaseLike, Subject
from harness.recording.capturing.module_calls import Capture
from harness.recording.measures import Overlap, RankCallIndex, SavedActivations
from harness.recording.ranges import attached
from harness.recording.recorder import Recorder
from harness.recording.spans import RankSpan, stopwatch
from harness.running.ranks.output import rank_output
from harness.running.ranks.rank_task import Localized, RankReport, RankTask, perform, placed, sendable
from harness.subject import Unanswered, answered, called, kept_per_rank, named_axes, offers, session

__all__ = ["Execution", "execute", "execute_captured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What one run gave: outcomes and captured activations by rank, the ledger when recorded.

    `unwaited` are asynchronous calls that were never waited for, `problem` is why activations could not be placed,
    `saved_bytes` by rank is the most that autograd held for backward, () when not measured. `hidden` are the calls
    (rank, call index) during which their rank computed a product, None when not measured. `spans` are those of ranks
    of a pipeline that ran at the same time.
    """

    outcomes: tuple[Localized, ...]
    captured: tuple[Localized, ...]
    events: tuple[Event, ...]
    unwaited: tuple[Unwaited, ...]
    seconds: float
    problem: str = ""
    saved_bytes: tuple[int, ...] = ()
    hidden: frozenset[RankCallIndex] | None = None
    spans: tuple[RankSpan, ...] = ()


class _Watcher(Protocol):
    """Recorder or capture: whatever must be entered in the thread of a rank."""

    def on_rank(self, rank: int) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class _Together:
    """Several watchers as one."""

    watchers: tuple[_Watcher, ...]

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        """Enter all of them."""
        with ExitStack() as stack:
            for watcher in self.watchers:
                stack.enter_context(watcher.on_rank(rank))
            yield


def _on_rank(rank: int, subject: Subject, case: CaseLike, device: torch.device, watcher: _Watcher | None) -> Localized:
    """The program of one rank."""
    if watcher is None:
        with rank_output():
            return localize(called(subject, case, device))
    with rank_output(), watcher.on_rank(rank):
        outcome = called(subject, case, device)
    return localize(outcome)


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
    start_s = time.perf_counter()
    if engine.remote:
        task = RankTask(case=case, subject=name or subject, device=device, text=text, record=record)
        return _remote(engine, task, start_s, timeout_s)
    if not record:
        outcomes = _run(engine, subject, case, device, None, None, timeout_s)
        return _execution(outcomes, (), (), engine, start_s)
    watch = stopwatch(device)
    with Recorder(
        text, case.mode, case.world_size, named_axes(case, subject), ranges=attached(), stopwatch=watch
    ) as recorder:
        outcomes = _run(engine, subject, case, device, recorder, recorder, timeout_s)
    return _execution(outcomes, (), recorder.events(), engine, start_s)


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
    start_s = time.perf_counter()
    if engine.remote:
        task = RankTask(case=case, subject=name or subject, device=device, watch=True, overlap=overlap)
        return _remote(engine, task, start_s, timeout_s)
    ranks, saved, places = range(case.world_size), SavedActivations(), offers(subject, "activations")
    with ExitStack() as watching:
        hiding = watching.enter_context(Overlap()) if overlap else None
        capture = watching.enter_context(Capture()) if places else None
        together = _Together(tuple(watcher for watcher in (capture, saved, hiding) if watcher is not None))
        outcomes = _run(engine, subject, case, device, together, hiding, timeout_s)
    captured: list[Localized] = []
    problem = ""
    try:
        if capture is not None:
            captured = answered("activations", lambda: [placed(case, subject, rank, capture) for rank in ranks])
    except Unanswered as error:  # the subject's own words on its layout: wrong words are told, the run stands
        problem = str(error)
    execution = _execution(outcomes, captured, (), engine, start_s)
    hidden = None if hiding is None else frozenset(hiding.hidden)
    return replace(execution, problem=problem, saved_bytes=tuple(map(saved.peak_bytes, ranks)), hidden=hidden)


def _remote(engine: Engine, task: RankTask, start_s: float, timeout_s: float) -> Execution:
    """The task on ranks in other processes, and what they report."""
    case = task.case
    reports: list[RankReport] = engine.run(
        perform, sendable(task), world_size=case.world_size, seed=case.seed, timeout_s=timeout_s
    )
    problem = next((report.problem for report in reports if report.problem), "")
    execution = _execution(
        [report.outcome for report in reports],
        [report.captured for report in reports] if task.watch and not problem else [],
        [event for report in reports for event in report.events],
        engine,
        start_s,
    )
    saved_bytes = tuple(report.saved_bytes for report in reports) if task.watch else ()
    hidden = frozenset(place for report in reports for place in report.hidden) if task.overlap else None
    spans = tuple(span for report in reports for span in report.spans)
    return replace(execution, problem=problem, saved_bytes=saved_bytes, hidden=hidden, spans=spans)


def _run(
    engine: Engine,
    subject: Subject,
    case: CaseLike,
    device: str,
    watcher: _Watcher | None,
    observer: Observer | None,
    timeout_s: float,
) -> list[Localized]:
    with chdir("."), session(subject):  # where a subject goes, the next run does not start
        return engine.run(
            _on_rank,
            subject,
            case,
            torch.device(device),
            watcher,
            world_size=case.world_size,
            observer=observer,
            seed=case.seed,
            timeout_s=timeout_s,
            per_rank=kept_per_rank(subject),
        )


def _execution(
    outcomes: Sequence[Localized],
    captured: Sequence[Localized],
    events: Sequence[Event],
    engine: Engine,
    start_s: float,
) -> Execution:
    return Execution(
        outcomes=tuple(outcomes),
        captured=tuple(captured),
        events=tuple(events),
        unwaited=tuple(engine.unwaited),
        seconds=time.perf_counter() - start_s,
    )
