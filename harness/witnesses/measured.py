"""What a rank does in a profiling session: warm up, run unwatched and timed, run once with recorder and witness.

The witness is switched on around the last run alone, or around the chosen steps of it, so its trace holds the measured
steps and no warm-up; seconds are of the same steps. `torch` leaves a Chrome trace and the Flight Recorder's entries of
them (harness.witnesses.switches); `nsys` draws nvtx ranges for the tool that listens, on a GPU in a capture range.
Outcomes are kept as digests, since witnesses must not change one bit. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.engines.devices import rank_device
from harness.engines.interposer import observing
from harness.errors import MachineError
from harness.ledger import Call, Event
from harness.outcome.blocks import Block, localize
from harness.protocols import CaseLike, Subject, case_text
from harness.recording.ranges import Ranges, open_domain
from harness.recording.recorder import Recorder
from harness.recording.stopwatch import Stopwatch, stopwatch
from harness.resolve import resolve
from harness.subject import named_axes, session
from harness.witnesses.chosen import during, step_ends
from harness.witnesses.switches import Tracing, captured

TOOLS = ("torch", "nsys")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What is measured, in words that can be pickled; `folder` takes what the witness leaves, `steps` are the chosen
    ones, None for all."""

    case: CaseLike
    subject: str
    device: str
    tool: str
    folder: str
    warmup: int = 1
    repeats: int = 3
    steps: range | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRank:
    """What one rank gave: the recorder's ledger of the whole run, the call indices that the witness was there for,
    seconds of the unwatched runs and of the watched one, both digests."""

    events: tuple[Event, ...]
    calls: range
    seconds: tuple[float, ...]
    watched_s: float
    peak_bytes: int
    plain: str
    watched: str


def measure(rank: int, measurement: Measurement) -> WatchedRank:
    """Run the subject on this rank as the measurement says; torch.distributed is initialised."""
    subject: Any = resolve(measurement.subject)
    with session(subject):
        return _measured(rank, measurement, subject)


def _measured(rank: int, measurement: Measurement, subject: Subject) -> WatchedRank:
    program = _Program(subject, rank_device(measurement.device, rank), rank, measurement)
    for _ in range(measurement.warmup):
        program.run()
    program.learn()
    timed = []
    for _ in range(max(measurement.repeats, 1)):
        dist.barrier()
        timed.append(program.timed())
    events, calls, spent, watched = _watched(rank, measurement, program)
    return WatchedRank(
        events=events,
        calls=calls,
        seconds=tuple(seconds for seconds, _ in timed),
        watched_s=spent,
        peak_bytes=_peak_bytes(program.device),
        plain=timed[-1][1],
        watched=watched,
    )


class _Program:
    """The subject on this rank, as often as it is run, and the stretch of a run that counts: chosen steps, or all."""

    def __init__(self, subject: Subject, device: torch.device, rank: int, measurement: Measurement) -> None:
        self.subject, self.device = subject, device
        self._case, self._rank, self._steps = measurement.case, rank, measurement.steps
        self._ends: tuple[int, ...] = ()

    def run(self) -> Mapping[str, Any]:
        """One run."""
        return self.subject(self._case, self.device)

    def learn(self) -> None:
        """See in one run more where steps end, if that matters."""
        if self._steps is not None:
            self._ends = step_ends(self._rank, self.run)

    def counting(self, make: Callable[[], AbstractContextManager[object]]) -> AbstractContextManager[object]:
        """Around a run: inside of `make()` for the stretch that counts."""
        return make() if self._steps is None else during(self._steps, self._ends, make)

    def timed(self, make: Callable[[], AbstractContextManager[object]] = nullcontext) -> tuple[float, str]:
        """Seconds of the stretch of one run, inside of `make()`, and the digest of what came out."""
        clock = _Clock(stopwatch(self.device))

        @contextmanager
        def stretch() -> Iterator[None]:
            with make(), clock.running():
                yield

        torch.manual_seed(self._case.seed)
        with self.counting(stretch):
            outcome = self.run()
        if not clock.ran:
            raise MachineError("the chosen steps of one run never began in the next one", ranks=(), positions=())
        return clock.seconds, digest(localize(outcome))


class _Clock:
    """Seconds of one stretch: by the device's stopwatch where there is one, else by the host's clock."""

    def __init__(self, watch: Stopwatch | None) -> None:
        self.seconds, self.ran = 0.0, False
        self._watch = watch

    @contextmanager
    def running(self) -> Iterator[None]:
        """The stretch."""
        start_s = time.perf_counter()
        first = None if self._watch is None else self._watch.mark()
        yield
        self.seconds, self.ran = time.perf_counter() - start_s, True
        if self._watch is not None and first is not None:
            self.seconds = self._watch.us(first, self._watch.mark()) / 1e6


class _Count:
    """Counts the calls of this rank (harness.ledger.Observer)."""

    def __init__(self) -> None:
        self.calls = 0

    def issued(self, _rank: int, _call: Call) -> int:
        """One more."""
        self.calls += 1
        return 0

    def completed(self, rank: int, ticket: int) -> None:
        """Nothing to count."""


def _watched(rank: int, measurement: Measurement, program: _Program) -> tuple[tuple[Event, ...], range, float, str]:
    case, count = measurement.case, _Count()
    ranges = Ranges(open_domain(), waiting=True) if measurement.tool == "nsys" else None
    seen = list[tuple[int, int]]()
    tracing = Tracing(rank, program.device)

    @contextmanager
    def witness() -> Iterator[None]:
        first = count.calls
        with ExitStack() as there:
            if ranges is None:
                there.enter_context(tracing.on())
            else:
                there.enter_context(captured(program.device))
                there.enter_context(ranges.drawn(rank))
            yield
        seen.append((first, count.calls))

    with ExitStack() as watching:
        recorder = watching.enter_context(
            Recorder(
                *(case_text(case), case.mode, case.world_size, named_axes(case, program.subject)),
                ranges=ranges,
                stopwatch=stopwatch(program.device),
            )
        )
        for observer in (recorder, count):
            watching.enter_context(observing(observer))
        watching.enter_context(recorder.on_rank(rank))
        spent, watched = program.timed(witness)
    if ranges is None:
        tracing.write(Path(measurement.folder))
    return tuple(recorder.events()), range(*seen[-1]), spent, watched


def _peak_bytes(device: torch.device) -> int:
    """The most memory this rank had: of its GPU's allocator, else of its whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def digest(outcome: Mapping[str, tuple[Block, ...]]) -> str:
    """A hash of every bit of an outcome: names, places and values."""
    hashed = hashlib.sha256()
    for name in sorted(outcome):
        for block in outcome[name]:
            local = block.local.detach().cpu().contiguous()
            hashed.update(f"{name} {block.region} {local.dtype} {tuple(local.shape)}".encode())
            hashed.update(local.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
