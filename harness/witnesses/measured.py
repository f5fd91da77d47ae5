"""The process of a profiling session: its ranks warm up, run unwatched and timed, run once with recorder and witness.

    python -m shardproof.harness.witnesses.measured FOLDER

The process runs the cases of FOLDER/job.pickle, between the command and the ranks, so that a tool can be put around it.
Ranks are spawned, one set of processes for all cases of a world size, and end in good order. A tool loses what a killed
process saw last. Every rank leaves FOLDER/<number of the case>/rank<r>.pickle, a `RankResult`.

The witness is switched on around the last run alone, or around the chosen steps of it. So its trace holds the measured
steps and no warm-up; seconds are of the same steps. `torch` leaves a Chrome trace and the Flight Recorder's entries of
them (harness.witnesses.chosen). `nsys` draws nvtx ranges for the tool that listens, on a GPU in a capture range.
Outcomes are kept as digests, since witnesses must not change one bit. Times are seconds, sizes bytes.
"""

import hashlib
import multiprocessing
import os
import pickle
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore

from shardproof.harness.engines.interposer import observe_calls
from shardproof.harness.engines.processes.rank_program import run_rank
from shardproof.harness.engines.processes.workers import Worker
from shardproof.harness.engines.rank_environment import ONE_THREAD, rank_device
from shardproof.harness.errors import MachineError
from shardproof.harness.ledger import Event
from shardproof.harness.outcome.blocks import Block, localize
from shardproof.harness.protocols import CaseLike, Subject, case_text
from shardproof.harness.recording.ranges import Ranges, open_domain
from shardproof.harness.recording.recorder import Recorder
from shardproof.harness.recording.spans import Stopwatch, stopwatch
from shardproof.harness.resolve import resolve
from shardproof.harness.subject import named_axes, session
from shardproof.harness.witnesses.chosen import TorchTrace, capture_range, step_ends, watch_steps
from shardproof.harness.witnesses.torch_trace import FLIGHT_SUFFIX, TRACE_SUFFIX

_START_S = 60.0
"""How long processes of ranks may take to start and import on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """The request of a session: the subject by name, the cases, one tool ("torch" or "nsys"), and numbers of runs.

    Each case runs `warmup` times untimed, then `repeats` times timed. `steps` are watched and timed, None for all.
    """

    subject: str
    cases: tuple[CaseLike, ...]
    tool: str
    device: str = "cpu"
    warmup: int = 1
    repeats: int = 3
    timeout_s: float = 60.0
    steps: range | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRank:
    """The result of one rank: the recorder's ledger of the whole run, and the calls that the witness watched.

    Then seconds of the unwatched runs and of the watched one, the most memory, and digests of the outcomes of an
    unwatched run (`plain`) and of the watched one.
    """

    events: tuple[Event, ...]
    calls: range
    seconds: tuple[float, ...]
    watched_s: float
    peak_bytes: int
    plain: str
    watched: str


def main(word: str) -> int:
    """Run the job of this folder. Exit status 1 if a rank did not end well in time."""
    folder = Path(word)
    left = folder / "job.pickle"
    job: SessionRequest = pickle.loads(left.read_bytes())
    left.unlink()
    os.environ |= ONE_THREAD
    start, ended_well = multiprocessing.get_context("spawn"), True
    for world_size in dict.fromkeys(case.world_size for case in job.cases):
        count = sum(case.world_size == world_size for case in job.cases)
        limit_s = time.monotonic() + _START_S + job.timeout_s * count
        ranks = [Worker(start, _rank, rank, world_size, folder, job) for rank in range(world_size)]
        for worker in ranks:
            worker.close(max(limit_s - time.monotonic(), 0.0))
            ended_well &= worker.process.exitcode == 0
    return 0 if ended_well else 1


def _rank(_pipe: Connection, _memory: int, rank: int, world_size: int, folder: Path, job: SessionRequest) -> None:
    """All cases of one world size on one rank."""
    store = FileStore(str(folder / f"store{world_size}"), world_size)
    for index, case in enumerate(job.cases):
        if case.world_size != world_size:
            continue
        own = folder / str(index)
        end = run_rank(
            measure,
            (job, case, own),
            rank=rank,
            world_size=world_size,
            store=PrefixStore(f"case{index}", store),
            seed=case.seed,
            timeout_s=job.timeout_s,
        )
        (own / f"rank{rank}.pickle").write_bytes(pickle.dumps(end))


def measure(rank: int, job: SessionRequest, case: CaseLike, folder: Path) -> WatchedRank:
    """Run the case on this rank as the job says, with torch.distributed initialised; the witness's files go to
    `folder`.

    Raises MachineError if there are no such steps.
    """
    subject: Any = resolve(job.subject)
    with session(subject):
        program = _Program(subject, rank_device(job.device, rank), case, job.steps)
        for _ in range(job.warmup):
            program.run()
        program.learn(rank)
        timed = []
        for _ in range(max(job.repeats, 1)):
            dist.barrier()
            timed.append(program.time_stretch())
        events, calls, spent_s, watched = _run_watched(rank, job.tool, program, folder)
    return WatchedRank(
        events=events,
        calls=calls,
        seconds=tuple(seconds for seconds, _ in timed),
        watched_s=spent_s,
        peak_bytes=_peak_bytes(program.device),
        plain=timed[-1][1],
        watched=watched,
    )


class _Program:
    """The subject on this rank, run several times, and the part of a run that counts: chosen steps, or all."""

    def __init__(self, subject: Subject, device: torch.device, case: CaseLike, steps: range | None) -> None:
        self.subject, self.device, self.case, self._steps = subject, device, case, steps
        self._ends: tuple[int, ...] = ()

    def run(self) -> Mapping[str, Any]:
        """Run the subject."""
        return self.subject(self.case, self.device)

    def learn(self, rank: int) -> None:
        """Find out in another run where steps end, if that matters."""
        if self._steps is not None:
            self._ends = step_ends(rank, self.run)

    def time_stretch(self, make: Callable[[], AbstractContextManager[object]] = nullcontext) -> tuple[float, str]:
        """Seconds of the part of one run, inside of `make()`, and the digest of its outcome."""
        seconds: list[float] = []

        @contextmanager
        def stretch() -> Iterator[None]:
            with make(), time_body(stopwatch(self.device), seconds):
                yield

        torch.manual_seed(self.case.seed)
        with stretch() if self._steps is None else watch_steps(self._steps, self._ends, stretch):
            outcome = self.run()
        if not seconds:
            raise MachineError("the chosen steps of one run never began in the next one")
        return seconds[-1], digest(localize(outcome))


@contextmanager
def time_body(watch: Stopwatch | None, seconds: list[float]) -> Iterator[None]:
    """Append the seconds of the body: by the device's stopwatch if there is one, else by the host's clock."""
    start_s = time.perf_counter()
    first = None if watch is None else watch.mark()
    yield
    spent_s = time.perf_counter() - start_s
    seconds.append(spent_s if watch is None or first is None else watch.us(first, watch.mark()) / 1e6)


def _run_watched(rank: int, tool: str, program: _Program, folder: Path) -> tuple[tuple[Event, ...], range, float, str]:
    """Run with recorder and witness: the ledger, the calls that the witness watched, seconds, digest."""
    case, device, seen = program.case, program.device, range(0)
    ranges = Ranges(open_domain(), waiting=True) if tool == "nsys" else None
    trace = TorchTrace(cuda=device.type == "cuda", stacks=True)

    @contextmanager
    def witness() -> Iterator[None]:
        nonlocal seen
        first = recorder.calls(rank)
        with ExitStack() as there:
            if ranges is None:
                there.enter_context(trace)
            else:
                there.enter_context(capture_range(device))
                there.enter_context(ranges.draw_rank(rank))
            yield
        seen = range(first, recorder.calls(rank))

    axes = named_axes(case, program.subject)
    with ExitStack() as watching:
        recorder = watching.enter_context(
            Recorder(case_text(case), case.mode, case.world_size, axes, ranges=ranges, stopwatch=stopwatch(device))
        )
        watching.enter_context(observe_calls(recorder))
        watching.enter_context(recorder.on_rank(rank))
        spent_s, watched = program.time_stretch(witness)
    if ranges is None:
        trace.write(folder / f"rank{rank}{TRACE_SUFFIX}", folder / f"rank{rank}{FLIGHT_SUFFIX}")
    return tuple(recorder.events()), seen, spent_s, watched


def _peak_bytes(device: torch.device) -> int:
    """The most memory of this rank: of its GPU's allocator, else of its whole process."""
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


if __name__ == "__main__":  # ranks find this module by its name, and a script has another
    sys.exit(import_module("shardproof.harness.witnesses.measured").main(*sys.argv[1:]))
