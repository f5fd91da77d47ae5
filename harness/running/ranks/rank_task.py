"""What one rank does for a run of a subject when ranks live in other processes: everything that is observed, is there.

`perform` is what an engine runs on every rank, with torch.distributed initialised; task and report can be pickled. In
the rank: the recorder and the interposer that feeds it, or the capture of activations and the count of saved bytes;
outcome and activations are placed there, because a DTensor knows its place only there. Sizes are bytes.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.engines.devices import rank_device
from harness.engines.interposer import observing
from harness.engines.threads.state.module_state import own_state
from harness.errors import RequestError, error_text
from harness.ledger import Event
from harness.outcome.blocks import Block, blocks, localize
from harness.protocols import CaseLike, Subject
from harness.recording.capturing.module_calls import Capture
from harness.recording.measures import Overlap, RankCallIndex, SavedActivations
from harness.recording.ranges import attached
from harness.recording.recorder import Recorder
from harness.recording.spans import RankSpan, stopwatch
from harness.resolve import resolve
from harness.subject import Unanswered, answered, called, kept_per_rank, named_axes, offers, session
from harness.torch_internals.compiler import leave_unloaded

__all__ = ["Localized", "RankReport", "RankTask", "perform", "placed", "sendable"]

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
class RankReport:
    """What one rank gave. `problem` is why its activations could not be placed."""

    outcome: Localized
    captured: Localized
    events: tuple[Event, ...] = ()
    problem: str = ""
    saved_bytes: int = 0
    hidden: frozenset[RankCallIndex] = frozenset()
    spans: tuple[RankSpan, ...] = ()


def sendable(task: RankTask) -> RankTask:
    """The task itself. Raises RequestError when it cannot be sent to another process."""
    try:
        pickle.dumps(task)
    except Exception as problem:  # whatever a user's own pickling raises
        rule = f"cannot be sent to the processes of the ranks ({error_text(problem)})"
        name = getattr(task.subject, "__qualname__", type(task.subject).__qualname__)
        raise RequestError(f"subject {name}: {rule}; legal: name it module:object") from problem
    return task


def perform(rank: int, task: RankTask) -> RankReport:
    """Run the subject on this rank as the task says."""
    leave_unloaded()
    found: Any = resolve(task.subject) if isinstance(task.subject, str) else task.subject
    device = rank_device(task.device, rank)
    with own_state(kept_per_rank(found)), session(found):
        if task.record:
            return _recorded(rank, task, found, device)
        return _watched(rank, task, found, device) if task.watch else _plain(found, task.case, device)


def placed(case: CaseLike, subject: Subject, rank: int, capture: Capture) -> Localized:
    """The captured tensors of one rank as blocks of full ones; modules without a counterpart are left out."""
    place = getattr(subject, "activations")  # noqa: B009  (optional, so the protocol does not declare it)

    def shards(kind: str, locals_: Mapping[str, Tensor]) -> Localized:
        found = {module: place(case, rank, module, local) for module, local in locals_.items()}
        return {f"{kind}/{module}": blocks(shard) for module, shard in found.items() if shard is not None}

    return shards("act", capture.outputs(rank)) | shards("act_grad", capture.gradients(rank))


def _plain(subject: Subject, case: CaseLike, device: torch.device) -> RankReport:
    return RankReport(outcome=localize(called(subject, case, device)), captured={})


def _recorded(rank: int, task: RankTask, subject: Subject, device: torch.device) -> RankReport:
    case = task.case
    past_s = time.perf_counter() - task.origin_s
    origin_s = task.origin_s if 0 <= past_s < _SAME_CLOCK_S else None
    on, watch = (task.text, case.mode, case.world_size, named_axes(case, subject)), stopwatch(device)
    with Recorder(*on, ranges=attached(), origin_s=origin_s, stopwatch=watch) as recorder:
        with observing(recorder), recorder.on_rank(rank):
            outcome = called(subject, case, device)
        events = tuple(recorder.events())
        return RankReport(outcome=localize(outcome), captured={}, events=events, spans=recorder.spans(rank, events))


def _watched(rank: int, task: RankTask, subject: Subject, device: torch.device) -> RankReport:
    case, saved, places = task.case, SavedActivations(), offers(subject, "activations")
    with ExitStack() as watching:
        hiding = watching.enter_context(Overlap()) if task.overlap else None
        if hiding is not None:
            watching.enter_context(observing(hiding))
            watching.enter_context(hiding.on_rank(rank))
        capture = watching.enter_context(Capture())
        for watcher in (capture, saved) if places else (saved,):
            watching.enter_context(watcher.on_rank(rank))
        outcome = called(subject, case, device)
    captured: Localized = {}
    problem = ""
    try:
        captured = answered("activations", lambda: placed(case, subject, rank, capture)) if places else {}
    except Unanswered as error:  # the subject's own words on its layout: wrong words are told, the run stands
        problem = str(error)
    return RankReport(
        outcome=localize(outcome),
        captured=captured,
        problem=problem,
        saved_bytes=saved.peak_bytes(rank),
        hidden=frozenset() if hiding is None else frozenset(hiding.hidden),
    )
