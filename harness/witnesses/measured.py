"""What a rank does in a profiling session: warm up, run unwatched and timed, run once with recorder and witness.

The witness is switched on around the last run alone, so its trace holds the measured steps and no warm-up. `torch`
leaves a Chrome trace and the Flight Recorder's entries of the same stretch; `nsys` draws nvtx ranges for the tool that
listens (and on a GPU opens its capture range). Outcomes are told as digests, since witnesses must not change one bit.
Times are seconds, sizes bytes.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from harness.interposer import observing
from harness.ledger import Event
from harness.outcome import Block, localize
from harness.protocols import Subject
from harness.ranges import Ranges, open_domain
from harness.rank_task import RankTask, rank_device
from harness.recorder import Recorder
from harness.resolve import resolve
from harness.witnesses.torch_trace import FLIGHT_SUFFIX, TRACE_SUFFIX

__all__ = ["TOOLS", "Measured", "Measurement", "digest", "measure"]

TOOLS = ("torch", "nsys")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What is measured, in words that can be pickled; `folder` takes what the witness leaves."""

    task: RankTask
    tool: str
    folder: str
    warmup: int = 1
    repeats: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank gave: the recorder's ledger, seconds of the unwatched runs and of the watched one, both digests."""

    events: tuple[Event, ...]
    seconds: tuple[float, ...]
    watched_s: float
    peak_bytes: int
    plain: str
    watched: str


def measure(rank: int, measurement: Measurement) -> Measured:
    """Run the subject on this rank as the measurement says; torch.distributed is initialised."""
    task = measurement.task
    subject: Any = resolve(task.subject) if isinstance(task.subject, str) else task.subject
    device = rank_device(task.device, rank)
    for _ in range(measurement.warmup):
        subject(task.case, device)
    seconds, plain = [], ""
    for _ in range(max(measurement.repeats, 1)):
        spent, plain = _timed(subject, task, device)
        seconds.append(spent)
    events, spent, watched = _watched(rank, measurement, subject, device)
    return Measured(
        events=events,
        seconds=tuple(seconds),
        watched_s=spent,
        peak_bytes=_peak_bytes(device),
        plain=plain,
        watched=watched,
    )


def _timed(subject: Subject, task: RankTask, device: torch.device) -> tuple[float, str]:
    """Seconds of one run, started together, and the digest of what came out."""
    torch.manual_seed(task.case.seed)
    dist.barrier()
    start_s = time.perf_counter()
    outcome = subject(task.case, device)
    _synchronize(device)
    spent = time.perf_counter() - start_s
    return spent, digest(localize(outcome))


def _watched(
    rank: int, measurement: Measurement, subject: Subject, device: torch.device
) -> tuple[tuple[Event, ...], float, str]:
    task = measurement.task
    ranges = Ranges(open_domain()) if measurement.tool == "nsys" else None
    with ExitStack() as watching:
        watching.enter_context(_captured(device, measurement.tool))
        recorder = watching.enter_context(
            Recorder(task.text, task.case.mode, task.case.world_size, task.case.axes, ranges=ranges)
        )
        watching.enter_context(observing(recorder))
        watching.enter_context(recorder.on_rank(rank))
        if measurement.tool == "torch":
            watching.enter_context(_traced(Path(measurement.folder), rank, device))
        torch.manual_seed(task.case.seed)
        start_s = time.perf_counter()
        outcome = subject(task.case, device)
        _synchronize(device)
        spent = time.perf_counter() - start_s
    return tuple(recorder.events()), spent, digest(localize(outcome))


@contextmanager
def _captured(device: torch.device, tool: str) -> Iterator[None]:
    """nsys's capture range on a GPU: from cudaProfilerStart to Stop, all ranks at once."""
    if tool != "nsys" or device.type != "cuda":
        yield
        return
    torch.cuda.profiler.start()
    dist.barrier()
    try:
        yield
    finally:
        dist.barrier()  # the first rank to stop ends the capture for all
        torch.cuda.profiler.stop()


@contextmanager
def _traced(folder: Path, rank: int, device: torch.device) -> Iterator[None]:
    """Write this rank's Chrome trace and the Flight Recorder's entries of the body."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    before = max((entry["record_id"] for entry in _flight()), default=-1)
    with profile(activities=activities, record_shapes=True, with_stack=True) as traced:
        yield
        # Once more at the end: the header of the beginning lacks the groups that the body made.
        header: Mapping[str, Any] = getattr(traced, "_get_distributed_info", dict)()
        if header:
            traced.add_metadata_json("distributedInfo", json.dumps(header))
    traced.export_chrome_trace(str(folder / f"rank{rank}{TRACE_SUFFIX}"))
    entries = [entry for entry in _flight() if entry["record_id"] > before]
    (folder / f"rank{rank}{FLIGHT_SUFFIX}").write_text(json.dumps({"entries": entries}), encoding="utf-8")


def _flight() -> list[Mapping[str, Any]]:
    """Torch's own log of calls, oldest first; empty where this torch keeps none."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    entries: list[Mapping[str, Any]] = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return sorted(entries, key=lambda entry: int(entry["record_id"]))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
