"""Turns the observations of one rank, as they come, into rows of its ledger, with bounded memory.

A call is written when it is complete. A call whose phase depends on what follows is written with the phase that it
would have at the end of the program, and once more when something else has settled it; with chosen steps it is written
when it is settled. Times are microseconds on the clock of the recording. The duration of an asynchronous call, and of
any call on a GPU, is not known here: 0.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from shardproof.harness.engines.calls.operators import MESSAGES, OperatorCall
from shardproof.harness.ledger import NO_UPDATE, OTHER, Event
from shardproof.harness.programs.session import ProgramSession
from shardproof.harness.recording.attribution import Attribution
from shardproof.harness.recording.lanes import Site
from shardproof.harness.recording.naming import AxisNames
from shardproof.harness.recording.observations import Issued, Stepped, read_observation
from shardproof.harness.recording.recorder import Recorded, event_of, only_captured

LAST_CALLS = 2000
"""The number of calls that are kept for a hang, as many as torch's Flight Recorder keeps."""
_OFTEN = 4096
_UNFOLLOWED = (*MESSAGES, OTHER)


@dataclass(slots=True, kw_only=True)
class _Open:
    """A call that is not complete, or not settled."""

    seen: Issued
    sent_rows: str = ""
    complete: bool = False
    duration_us: float = 0.0
    written: Site | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PastCall:
    """A recent call. `number` is its number in its channel (harness.engines.calls.matching), `ticket` its index on the
    rank.
    """

    issued: OperatorCall
    number: int
    ticket: int
    site: Site
    axis: str
    caller: Any


@dataclass(slots=True)
class _Step:
    """The current step."""

    number: int = 0
    started_s: float = 0.0
    updated_s: float = 0.0
    microbatches: int = 0


@dataclass(slots=True, kw_only=True)
class EventStream:
    """`feed` takes observations in any thread; `on_event` and `on_step` receive rows, `on_begin` the number of a new
    step.

    `stirred` counts observations, `calls` the calls, `recorded` those in recorded steps, `recorded_bytes` their
    payloads, `steps` the recorded steps. `last` are the last calls, `doubts` say what is uncertain.
    """

    of: Recorded
    session: ProgramSession
    on_event: Callable[[Event], object]
    on_step: Callable[[tuple[object, ...]], object]
    on_begin: Callable[[int], object] = lambda _step: None
    origin_s: float = 0.0
    stirred: int = 0
    calls: int = 0
    recorded: int = 0
    recorded_bytes: int = 0
    steps: int = 0
    last: deque[PastCall] = field(default_factory=lambda: deque(maxlen=LAST_CALLS))
    doubts: dict[str, None] = field(default_factory=dict)
    _attribution: Attribution = field(default_factory=Attribution)
    _lock: Any = field(default_factory=threading.RLock)
    _open: dict[int, _Open] = field(default_factory=dict)
    _axes: AxisNames = field(init=False)
    _numbers: dict[tuple[str, tuple[int, ...], str], int] = field(default_factory=dict)
    _step: _Step = field(default_factory=_Step)
    _fed: int = 0

    def __post_init__(self) -> None:
        self._axes = AxisNames({}, self.of.world_size)

    def feed(self, plain: tuple[Any, ...], issued: OperatorCall | None) -> PastCall | None:
        """Read an observation (`observations.read_observation`), and for a call the arguments of its operator.

        Returns the call if its step is recorded.
        """
        past = None
        with self._lock:
            self.stirred += 1
            seen, attribution = read_observation(plain), self._attribution
            attribution.feed(seen)
            if isinstance(seen, Issued):
                past = self._take_issue(seen, issued)
            else:
                self._write_settled_calls()
                if isinstance(seen, Stepped):
                    self._step.updated_s = time.perf_counter()
            if attribution.step != self._step.number or not self._step.started_s:
                self._begin(attribution.step)
            self._step.microbatches = max(self._step.microbatches, attribution.microbatch + 1)
            self._fed += 1
            if not self._fed % _OFTEN:
                attribution.forget()
                self._write_settled_calls()
        return past

    def on_completion(self, ticket: int) -> None:
        """The call has completed: its wait returned."""
        with self._lock:
            self.stirred += 1
            if (call := self._open.get(ticket)) is not None and not call.complete:
                if call.seen.call.device == "cpu":
                    call.duration_us = round((time.perf_counter() - call.seen.started_s) * 1e6, 3)
                self._complete(ticket, call)

    def close(self) -> None:
        """The program has ended: settle and write the open calls."""
        with self._lock:
            self._attribution.settle("")
            self._write_settled_calls()
            if self._attribution.stepless:
                self.doubts[NO_UPDATE] = None
            self._end_step()

    @property
    def step(self) -> int:
        """The number of the current step."""
        return self._step.number

    def incomplete(self) -> tuple[int, ...]:
        """The tickets of synchronous calls that have not completed, oldest first."""
        with self._lock:
            return tuple(ticket for ticket, call in self._open.items() if not call.complete)

    def numbers(self) -> list[tuple[str, tuple[int, ...], str, int]]:
        """The number of calls in each channel (harness.engines.calls.matching.Channel)."""
        with self._lock:
            return [(*channel, number) for channel, number in self._numbers.items()]

    def _begin(self, number: int) -> None:
        if self._step.started_s:
            self._end_step()
        self._step = _Step(number, time.perf_counter())
        self.on_begin(number)

    def _end_step(self) -> None:
        step = self._step
        if step.started_s and self.session.covers(step.number):
            updated = round((step.updated_s - self.origin_s) * 1e6, 3) if step.updated_s else ""
            self.steps += 1
            self.on_step((step.number, round((step.started_s - self.origin_s) * 1e6, 3), updated, step.microbatches))

    def _take_issue(self, seen: Issued, issued: OperatorCall | None) -> PastCall | None:
        if only_captured(seen):
            return None
        self.calls += 1
        call = self._open[seen.ticket] = _Open(seen=seen)
        if issued is not None:  # rows, or shapes as rows, that an all_to_all sends to each rank: "3+0+5"
            rows = (one if isinstance(one, int) else one[0] if one else 1 for one in issued.sends)
            call.sent_rows = "+".join(map(str, rows))
        past = None if issued is None else self._remember_call(seen, issued)
        if seen.call.is_async or seen.call.op in _UNFOLLOWED or seen.graphed is not None:
            self._complete(seen.ticket, call)
        return past if past is not None and self.session.covers(past.site.step) else None

    def _remember_call(self, seen: Issued, issued: OperatorCall) -> PastCall:
        op, peer = issued.call.op, issued.call.peer
        counted = issued.group, issued.call.group, f"{op} {peer}" if op in MESSAGES else ""
        number = self._numbers[counted] = self._numbers.get(counted, 0) + 1
        site = self._attribution.sites[seen.ticket]
        axis = self._axis(seen, site)
        past = PastCall(issued=issued, number=number, ticket=seen.ticket, site=site, axis=axis, caller=seen.caller)
        self.last.append(past)
        return past

    def _complete(self, ticket: int, call: _Open) -> None:
        call.complete = True
        waiting = next((one for one in reversed(self._attribution.pending) if one.ticket == ticket), None)
        if waiting is None:
            self._write(ticket, call, self._attribution.sites[ticket])
            self._drop(ticket)
        elif self.session.steps is None:
            site = self._attribution.sites[ticket]
            self._write(ticket, call, site._replace(phase=waiting.phase("", gathers_parameters=False)))

    def _write_settled_calls(self) -> None:
        """Write the calls that are complete and settled."""
        if len(self._open) <= len(self._attribution.pending):
            return  # all that is open waits
        waiting = {one.ticket for one in self._attribution.pending}
        for ticket in [ticket for ticket, call in self._open.items() if call.complete and ticket not in waiting]:
            call = self._open[ticket]
            self._write(ticket, call, self._attribution.sites[ticket])
            self._drop(ticket)

    def _drop(self, ticket: int) -> None:
        del self._open[ticket], self._attribution.sites[ticket]

    def _write(self, ticket: int, call: _Open, site: Site) -> None:
        for doubt in self._attribution.doubts(ticket):
            if doubt != NO_UPDATE:  # which may be seen later
                self.doubts[doubt] = None
        if site == call.written or not self.session.covers(site.step):
            return
        if call.written is None:
            self.recorded += 1
            self.recorded_bytes += call.seen.call.payload_bytes
        call.written = site
        started_us = round((call.seen.started_s - self.origin_s) * 1e6, 3)
        axis = self._axis(call.seen, site)
        event = event_of(
            call.seen, site, of=self.of, axis=axis, doubts=(), start_us=started_us, duration_us=call.duration_us
        )
        self.on_event(replace(event, sent_rows=call.sent_rows) if call.sent_rows else event)

    def _axis(self, seen: Issued, site: Site) -> str:
        axis, doubt = self._axes.of(seen.call, site.phase)
        if doubt:
            self.doubts[doubt] = None
        return axis
