"""The recorder: an observer that turns the calls of every rank into the events of the ledger.

    with Recorder(str(case), mode, world_size, axes) as recorder:
        ...  # in the thread of each rank: with recorder.on_rank(rank): program(rank)
    recorder.events()

While ranks run it only keeps plain tuples; steps, phases, regions and axes are worked out when the events are read.
Times are microseconds since the recorder was entered. A call that never completed, or whose completion is not reported
(an async call of gloo), has duration_us 0. With a stopwatch, calls on the device are timed by marks in their streams.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from shardproof.harness.engines.calls.callers import Caller, frames_left
from shardproof.harness.ledger import Call, Event, shape_text, wire_bytes
from shardproof.harness.recording.attribution import Attribution
from shardproof.harness.recording.lanes import Site
from shardproof.harness.recording.naming import AxisNames
from shardproof.harness.recording.observations import Entered, Issued, Left, read_observation
from shardproof.harness.recording.spans import Mark, RankSpan, Stopwatch, rank_spans
from shardproof.harness.recording.watch import WATCHING, Emit, Watch, saves_or_loads
from shardproof.harness.torch_internals.autograd import node_raised

if TYPE_CHECKING:
    from shardproof.harness.recording.ranges import Ranges


class _Track:
    """The records of one rank: observations as plain tuples, when its calls ended, their marks on a device."""

    def __init__(self) -> None:
        self.observations: list[tuple[Any, ...]] = []
        self.ended_s: dict[int, float] = {}
        self.waited_s: dict[int, float] = {}
        self.begun: dict[int, Mark] = {}
        self.ended: dict[int, Mark] = {}


class Recorder:
    """Observes the calls of a run (harness.ledger.Observer); `events()` gives the ledger.

    `axes` maps a mesh axis to the rank lists of its groups. With `ranges`, nvtx ranges are recorded too. Times begin at
    `origin_s`, of time.perf_counter, if several recorders share a clock, else when it is entered. `stopwatch` is that
    of the device of the ranks of this process, None for the host's clock.
    """

    def __init__(
        self,
        case: str,
        mode: str,
        world_size: int,
        axes: Mapping[str, tuple[tuple[int, ...], ...]],
        *,
        ranges: "Ranges | None" = None,
        origin_s: float | None = None,
        stopwatch: "Stopwatch | None" = None,
    ) -> None:
        self._case = case
        self._mode = mode
        self._world_size = world_size
        self._names = AxisNames(axes, world_size)
        self._ranges = ranges
        self._tracks: dict[int, _Track] = {}
        self._origin_s = origin_s
        self._stopwatch = stopwatch
        self._start_s = time.perf_counter()
        self._watch = Watch(self._emit, ends=ranges is not None)

    def __enter__(self) -> Self:
        self._start_s = time.perf_counter() if self._origin_s is None else self._origin_s
        self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.__exit__()

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        """To be entered in the thread that runs a rank's program, around the whole program."""
        with ExitStack() as entered:
            if self._ranges is not None:
                facts = {"world_size": self._world_size, "mode": self._mode, "case": self._case}
                entered.enter_context(self._ranges.on_rank(rank, **facts))
            entered.enter_context(self._watch.on_rank(rank))
            yield

    def on_issue(self, rank: int, call: Call) -> int:
        """A rank is about to issue a call; the ticket is the call's index on the rank."""
        ticket = self._watch.lane(rank).issue(call, sys._getframe(1))
        if self._stopwatch is not None and call.device == "cuda":
            self._tracks[rank].begun[ticket] = self._stopwatch.mark()
        return ticket

    def on_completion(self, rank: int, ticket: int) -> None:
        """The call behind the ticket has completed on this rank."""
        track = self._tracks[rank]
        track.ended_s[ticket] = time.perf_counter()
        if self._stopwatch is not None and ticket in track.begun:
            track.ended[ticket] = self._stopwatch.mark()
        if self._ranges is not None:
            self._ranges.on_completion(rank, ticket)

    def on_wait(self, rank: int, ticket: int) -> None:
        """The rank first waits for the asynchronous call of the ticket."""
        self._tracks[rank].waited_s.setdefault(ticket, time.perf_counter())

    def spans(self, rank: int, events: Sequence[Event]) -> tuple[RankSpan, ...]:
        """The spans of this rank, whose `events` these are; () if it has no pipeline."""
        observations = [read_observation(plain) for plain in self._track(rank).observations]
        waited_us = {ticket: (at - self._start_s) * 1e6 for ticket, at in self._track(rank).waited_s.items()}
        return rank_spans(observations, Attribution.of(observations), events, waited_us, self._start_s)

    def events(self) -> list[Event]:
        """The ledger so far, by rank and call index. Calls that wait for what follows are settled as at the end."""
        return [event for rank in sorted(self._tracks) for event in self._events(rank, self._tracks[rank])]

    def calls(self, rank: int) -> int:
        """The number of calls that the rank has issued so far."""
        return sum(plain[0] is Issued for plain in list(self._track(rank).observations))

    def models(self, rank: int) -> list[nn.Module]:
        """The models of a rank: the outermost modules that it called, each once."""
        seen = map(read_observation, list(self._track(rank).observations))
        called = (one.module for one in seen if isinstance(one, Entered) and one.outermost)
        return list({id(module): module for module in called}.values())

    def site_raised(self, rank: int, error: BaseException) -> Site:
        """Where a rank's program was when it raised this exception."""
        observations = [read_observation(plain) for plain in self._track(rank).observations]
        frames = [*frames_left(error)]
        # Modules that this exception left are popped, since it was raised in them. If its traceback has no frame of the
        # wrapper, another exception left them: recomputation raises one to stop early.
        if any(frame.f_code is WATCHING for frame in frames):
            while observations and isinstance(observations[-1], Left) and observations[-1].raised:
                observations.pop()
        in_backward, node = node_raised(frames)
        site = Attribution.of(observations).raised_at(in_backward=in_backward, node=node)
        loads = not site.phase and any(saves_or_loads(frame.f_code) for frame in frames)
        return site._replace(phase="checkpoint") if loads else site

    def site_of_last_call(self, rank: int) -> Site | None:
        """Where a rank issued its latest call; None if it has issued none."""
        observations = [read_observation(plain) for plain in list(self._track(rank).observations)]
        issued = [seen.ticket for seen in observations if isinstance(seen, Issued)]
        return Attribution.of(observations).sites[issued[-1]] if issued else None

    def _track(self, rank: int) -> _Track:
        track = self._tracks.get(rank)
        return self._tracks.setdefault(rank, _Track()) if track is None else track

    def _emit(self, rank: int) -> Emit:
        """A function that keeps a rank's observations, and passes them to the ranges if there are any."""
        keep = self._track(rank).observations.append
        if self._ranges is None:
            return keep
        draw = self._ranges.of(rank)

        def emit(plain: tuple[Any, ...]) -> None:
            keep(plain)
            draw(read_observation(plain))

        return emit

    def _events(self, rank: int, track: _Track) -> Iterator[Event]:
        observations = [read_observation(plain) for plain in list(track.observations)]
        attribution = Attribution.of(observations)
        calls = (seen for seen in observations if isinstance(seen, Issued) and not only_captured(seen))
        issued = sorted(calls, key=lambda seen: seen.ticket)
        for seen in issued:
            site = attribution.sites[seen.ticket]
            axis, doubt = self._names.of(seen.call, site.phase)
            doubts = (*((doubt,) if doubt else ()), *attribution.doubts(seen.ticket))
            began_s, took_s = self._span_s(track, seen)
            event = event_of(
                seen,
                site,
                of=Recorded(case=self._case, mode=self._mode, world_size=self._world_size, rank=rank),
                axis=axis,
                doubts=doubts,
                start_us=round((began_s - self._start_s) * 1e6, 3),
                duration_us=round(took_s * 1e6, 3),
            )
            unasked = attribution.returned and (event.step, event.microbatch) not in attribution.returned
            yield replace(event, needs_gradient=False) if event.needs_gradient and unasked else event

    def _span_s(self, track: _Track, seen: Issued) -> tuple[float, float]:
        """Start and duration of a call: on its device if that was marked, else on the host."""
        begun, ended = track.begun.get(seen.ticket), track.ended.get(seen.ticket)
        if self._stopwatch is None or begun is None:
            return seen.started_s, track.ended_s.get(seen.ticket, seen.started_s) - seen.started_s
        return self._stopwatch.host_s(begun), 0.0 if ended is None else self._stopwatch.us(begun, ended) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Facts that all events of one rank share."""

    case: str
    mode: str
    world_size: int
    rank: int


def only_captured(seen: Issued) -> bool:
    """Whether this call was issued in the capture of a CUDA graph: that sends nothing, its replays do."""
    return seen.graphed is not None and seen.graphed.replay < 0


def event_of(
    seen: Issued, site: Site, *, of: Recorded, axis: str, doubts: tuple[str, ...], start_us: float, duration_us: float
) -> Event:
    """The event of a call with this site; times in microseconds."""
    call: Call = seen.call
    return Event(
        case=of.case,
        mode=of.mode,
        world_size=of.world_size,
        rank=of.rank,
        step=site.step,
        microbatch=site.microbatch,
        phase=site.phase,
        region=site.region,
        op=call.op,
        reduce_op=call.reduce_op,
        axis=axis,
        group_size=len(call.group),
        dtype=call.dtype,
        shape=shape_text(call.shapes),
        payload_bytes=call.payload_bytes,
        wire_bytes=wire_bytes(call.op, call.payload_bytes, len(call.group)),
        is_async=call.is_async,
        call_index=seen.ticket,
        start_us=start_us,
        duration_us=duration_us,
        caller="" if seen.caller is None else Caller(*seen.caller).place,
        graph="" if seen.graphed is None else seen.graphed.graph,
        group=call.group,
        operator=call.operator,
        doubts=doubts,
        needs_gradient=call.needs_gradient,
    )
