"""When a rank computes a forward or a backward, and when its asynchronous calls are in progress, from one real run.

A forward begins when a model with parameters is called, or with the delivery of its batch just before. A backward
begins when it reaches that model's output. Either ends when the rank does something else outside of modules and
backward: messages between stages, the next forward or backward, reductions, updates. So calls inside, and waiting for
them, count as computing; only the first wait for a message between stages ends it. Units: microseconds.

On a device the host's clock would give the time at which a call was enqueued, so calls are timed by CUDA events in its
streams (Stopwatch). Recording an event waits for nothing, so the streams run as they would. The time between the two
events of a call is what it took on the device, its wait for other ranks included. They are read when the program is
over. Source: torch.cuda.Event; its resolution is half a microsecond.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from shardproof.harness.ledger import Event
from shardproof.harness.recording.attribution import Attribution
from shardproof.harness.recording.observations import OUTSIDE, Arrived, Entered, Issued, Left, Observation, Stepping

_MESSAGES = "pipeline"
_WITH_THE_NEXT = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpan:
    """A forward ("F") or backward ("B") of a rank, or one asynchronous call (`kind` is its op). Times: microseconds.

    `chunk` numbers the models that the rank calls; -1 for calls. A call is in progress until its rank first waits for
    it; `call_index` is that of the ledger, -1 for computations.
    """

    rank: int
    step: int
    kind: str
    micro: int
    chunk: int
    start_us: float
    end_us: float
    call_index: int = -1


SPAN_COLUMNS = ("case", *(each.name for each in fields(RankSpan)))


def span_row(case: str, span: RankSpan) -> tuple[object, ...]:
    """The row of `spans.csv`."""
    return case, *astuple(span)


def rank_spans(
    observations: Sequence[Observation],
    attribution: Attribution,
    events: Sequence[Event],
    waited_us: Mapping[int, float],
    start_s: float,
) -> tuple[RankSpan, ...]:
    """The computations of one rank in order of their ends, then its awaited asynchronous calls; () without a pipeline.

    `attribution` has read these observations. `events` are the rank's, `waited_us` is when it first waited for the call
    of that index, `start_s` the time at which times begin.
    """
    if not any(event.phase == _MESSAGES for event in events):
        return ()
    counted = {id(seen): (step, micro) for seen, step, micro in attribution.forwards or ()}
    reading = _Reading(rank=events[0].rank, counted=counted, start_s=start_s)
    phases = {event.call_index: event.phase for event in events}
    for seen in observations:
        reading.feed(seen, phases)
    awaited = sorted(at for ticket, at in waited_us.items() if phases.get(ticket) == _MESSAGES)
    computed = [  # up to the first wait for a message in it
        replace(span, end_us=next((at for at in awaited if span.start_us < at < span.end_us), span.end_us))
        for span in reading.spans
    ]
    calls = [
        RankSpan(
            rank=event.rank,
            step=event.step,
            kind=event.op,
            micro=event.microbatch,
            chunk=-1,
            start_us=event.start_us,
            end_us=waited_us[event.call_index],
            call_index=event.call_index,
        )
        for event in events
        if event.is_async and event.call_index in waited_us
    ]
    return (*computed, *calls)


class _Forward(NamedTuple):
    """A forward that began: its lane, the number of the first autograd node that it may make, and what it computes."""

    lane: int
    number: int
    step: int
    micro: int
    chunk: int


class _Reading:
    """The computations of a rank, read from its observations in order."""

    def __init__(self, *, rank: int, counted: Mapping[int, tuple[int, int]], start_s: float) -> None:
        self.spans: list[RankSpan] = []
        self._rank, self._counted, self._start_s = rank, counted, start_s
        self._forwards: list[_Forward] = []
        self._models: list[int] = []
        self._depth: dict[int, int] = {}
        self._open: tuple[str, _Forward, float] | None = None
        self._task = OUTSIDE
        self._prepared_us: float | None = None

    def feed(self, seen: Observation, phases: Mapping[int, str]) -> None:
        """Read the next observation; `phases` of calls by ticket."""
        match seen:
            case Entered():
                self._depth[seen.lane] = self._depth.get(seen.lane, 0) + 1
                if id(seen) in self._counted:
                    self._forward(seen, *self._counted[id(seen)])
            case Left():
                self._depth[seen.lane] -= 1
            case Arrived() if seen.task != self._task:
                made = [one for one in self._forwards if one.lane == seen.made_in and one.number <= seen.node]
                self._begin("B", made[-1], self._us(seen.at_s)) if made else None
                self._task = seen.task
            case Stepping():
                self._end(self._us(seen.at_s))
            case Issued() if seen.task == OUTSIDE and not self._depth.get(seen.lane):
                self._close_stretch(self._us(seen.started_s), phases.get(seen.ticket, ""))

    def _us(self, at_s: float) -> float:
        return round((at_s - self._start_s) * 1e6, 3)

    def _forward(self, seen: Entered, step: int, micro: int) -> None:
        if id(seen.module) not in self._models:
            self._models.append(id(seen.module))
        at_us, chunk = self._us(seen.at_s), self._models.index(id(seen.module))
        forward = _Forward(seen.lane, seen.number, step, micro, chunk)
        self._forwards.append(forward)
        self._begin("F", forward, at_us if self._prepared_us is None else self._prepared_us)

    def _close_stretch(self, at_us: float, phase: str) -> None:
        if phase == _WITH_THE_NEXT:
            self._prepared_us = at_us if self._prepared_us is None else self._prepared_us
        elif phase == _MESSAGES:
            self._prepared_us = None
        if self._open is not None and (phase != "loss" or self._open[0] == "B"):
            self._end(at_us)

    def _begin(self, kind: str, forward: _Forward, at_us: float) -> None:
        self._end(at_us)
        self._open, self._prepared_us = (kind, forward, at_us), None

    def _end(self, at_us: float) -> None:
        if self._open is None:
            return
        kind, forward, start_us = self._open
        self._open = None
        self.spans.append(
            RankSpan(
                rank=self._rank,
                step=forward.step,
                kind=kind,
                micro=forward.micro,
                chunk=forward.chunk,
                start_us=start_us,
                end_us=max(at_us, start_us),
            )
        )


Mark = Any
"""A point in a stream: torch.cuda.Event, made with enable_timing."""


class Stopwatch:
    """Marks streams, and gives the time of marks on the host's clock, time.perf_counter."""

    def __init__(self, make: Callable[[], Mark], synchronize: Callable[[], object]) -> None:
        self._make = make
        synchronize()  # an idle device passes the first mark at once, which relates both clocks
        self._origin = self.mark()
        self._origin_s = time.perf_counter()

    def mark(self) -> Mark:
        """A mark in the current stream of this thread."""
        made = self._make()
        made.record()
        return made

    def us(self, first: Mark, last: Mark) -> float:
        """The time from one mark to the other. Waits until both have passed."""
        for one in (first, last):
            one.synchronize()
        return float(first.elapsed_time(last)) * 1e3

    def host_s(self, mark: Mark) -> float:
        """When the mark passed, on the host's clock."""
        return self._origin_s + self.us(self._origin, mark) / 1e6


def stopwatch(device: str | torch.device) -> Stopwatch | None:
    """The stopwatch of a device; None if the host's clock is exact: on a CPU, and on meta tensors."""
    on = torch.device(device)
    if on.type != "cuda":
        return None
    return Stopwatch(lambda: torch.cuda.Event(enable_timing=True), lambda: torch.cuda.synchronize(on))
